"""The source of checkpoints without torch; what it records is shown in real_vllm/test_real_checkpoints."""

import asyncio
import sys
import threading
from types import SimpleNamespace

import pytest

from coterie.calibration.prompts import Prompt
from coterie.calibration.sources import checkpoint as module
from coterie.calibration.sources.checkpoint import CheckpointSource
from coterie.calibration.sources.loading import CheckpointOptions, Loaded, load
from coterie.core import ModelGeometry
from coterie.errors import EngineError, InputError, UnsupportedError

TEXT = Prompt("p.jsonl:1", "", "two words", None)
CHAT = Prompt("p.jsonl:2", "", None, [{"role": "user", "content": "hi"}])


class WordTokenizer:
    """A token a word, after a begin-of-text token."""

    def __call__(self, text):
        return {"input_ids": [1, *(len(word) for word in text.split())]}

    def apply_chat_template(self, messages, *, add_generation_prompt, return_dict):
        assert add_generation_prompt
        assert return_dict
        if messages[0]["role"] == "system":
            raise RuntimeError("no system role here")
        return {"input_ids": [7, 7, len(messages)]}


@pytest.fixture
def folder(tmp_path):
    """A folder that looks like a checkpoint."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def loaded(context=None):
    return Loaded(None, WordTokenizer(), "cpu", "float32", context)


# --- before and while loading ----------------------------------------------------------------------------


def test_without_torch_the_extra_to_install_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'coterie\[transformers\]'"):
        load(CheckpointOptions(str(folder)))


@pytest.mark.parametrize("checkpoint", ["/no/such/folder", "./none", "a/b/c"])
def test_what_is_neither_folder_nor_name_is_refused(checkpoint):
    with pytest.raises(InputError, match="no such folder, and it is no name on the hub"):
        load(CheckpointOptions(checkpoint))


def test_a_folder_without_a_config_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"holds no config\.json"):
        load(CheckpointOptions(str(folder)))


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="a pickle may run any code"):
        load(CheckpointOptions(str(folder)))


def installed(monkeypatch, tokenizer, model):
    """Stand-ins for torch and transformers, whose loaders do as told."""
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    transformers = SimpleNamespace(
        __version__="5.1",
        AutoConfig=SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace()),
        AutoTokenizer=SimpleNamespace(from_pretrained=tokenizer),
        AutoModelForCausalLM=SimpleNamespace(from_pretrained=model),
        utils=SimpleNamespace(logging=SimpleNamespace(is_progress_bar_enabled=bool, disable_progress_bar=bool)),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "transformers", transformers)


@pytest.mark.parametrize("failure", [TypeError("no\nmapping"), AttributeError("no mapping"), Exception("no mapping")])
def test_whatever_fails_in_loading_is_one_message(folder, monkeypatch, failure):
    def fail(*_, **__):
        raise failure

    installed(monkeypatch, fail, fail)
    with pytest.raises(InputError, match=r"checkpoint /.*: cannot be loaded: no mapping"):
        load(CheckpointOptions(str(folder)))


def test_a_checkpoint_without_a_tokenizer_is_refused(folder, monkeypatch):
    class Empty:
        all_special_ids = (0,)

        def __len__(self):
            return 1

    class Model:
        def to(self, _):
            return self

    installed(monkeypatch, lambda *_, **__: Empty(), lambda *_, **__: (Model(), {}))
    with pytest.raises(InputError, match="its tokenizer knows no token; copy the tokenizer's files"):
        load(CheckpointOptions(str(folder)))


# --- prompts ---------------------------------------------------------------------------------------------


def test_a_plain_prompt_has_its_special_tokens_and_a_chat_its_template():
    assert loaded().tokenize(TEXT) == [1, 3, 5]
    assert loaded().tokenize(CHAT) == [7, 7, 1]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "hi"}]}, "content is not one string"),
        ({"role": "user"}, "content is not one string"),
        ({"role": "system", "content": "hi"}, "template does not take it: no system role here"),
    ],
)
def test_a_chat_that_the_template_cannot_take_is_refused(message, problem):
    with pytest.raises(InputError, match=problem):
        loaded().tokenize(Prompt("p.jsonl:1", "", None, [message]))


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [(0, "the prompt has no tokens"), (9, "9 tokens and 4 output tokens are more than the 12")],
)
def test_a_prompt_that_does_not_fit_is_refused(tokens, problem):
    with pytest.raises(InputError, match=problem):
        module._check_length(tokens, 4, 12)


def test_a_prompt_that_just_fits_is_run():
    module._check_length(8, 4, 12)
    module._check_length(10_000, 4, None)


# --- the source ------------------------------------------------------------------------------------------


class Runner:
    """Runs a text until told to stop, or fails as asked."""

    def __init__(self, scoring="softmax", failure=None):
        self.loaded = loaded()
        self.routers = SimpleNamespace(geometry=ModelGeometry(2, 4, 1), scoring=scoring)
        self.failure = failure
        self.running = threading.Event()
        self.ended = threading.Event()
        self.stop = threading.Event()

    def run(self, prompt, max_tokens):
        if self.failure:
            raise self.failure
        self.running.set()
        self.stop.wait(30)
        self.ended.set()


def source_of(runner, monkeypatch, folder):
    notices = []
    source = CheckpointSource(CheckpointOptions(str(folder)), notice=notices.append)
    monkeypatch.setattr(source, "_load", lambda: runner)
    runner.stop = source._stop
    return source, notices


@pytest.mark.parametrize(("scoring", "gates"), [("softmax", "gate probabilities and logits"), (None, "gate logits")])
def test_a_source_tells_what_it_records_and_how(folder, monkeypatch, scoring, gates):
    source, notices = source_of(Runner(scoring), monkeypatch, folder)

    async def name():
        async with source:
            return await source.model()

    assert asyncio.run(name()) == folder.name
    assert source.records == f"counts, ids, {gates} by transformers from {folder} in float32 on cpu"
    assert notices[:2] == [f"loading {folder}", f"{folder.name}: 2 layers x 4 experts, top-1, float32 on cpu"]
    assert len(notices[2:]) == (scoring is None)


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), InputError("no tokens")])
def test_a_failure_names_the_prompt(folder, monkeypatch, failure):
    source, _ = source_of(Runner(failure=failure), monkeypatch, folder)

    async def record():
        async with source:
            await source.record(TEXT, 4)

    with pytest.raises(EngineError, match=f"p.jsonl:1: {failure}"):
        asyncio.run(record())


def test_leaving_ends_the_text_that_is_running(folder, monkeypatch):
    runner = Runner()
    source, _ = source_of(runner, monkeypatch, folder)

    async def interrupted():
        async with source:
            waiting = asyncio.ensure_future(source.record(TEXT, 4))
            queued = asyncio.ensure_future(source.record(CHAT, 4))
            await asyncio.to_thread(runner.running.wait, 30)
            waiting.cancel()
            queued.cancel()
        await asyncio.to_thread(runner.ended.wait, 30)

    asyncio.run(interrupted())
    assert runner.ended.is_set()
