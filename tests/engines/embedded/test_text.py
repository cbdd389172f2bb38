"""Whole characters, and the prompts that the checkpoint's own template makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from coterie.engines.embedded.text import Tokenizer
from coterie.errors import InputError, RequestError, UnsupportedError

FIXTURE = Path("models/coterie-tiny").resolve()
TINY = Tokenizer.load(FIXTURE)
BACKEND = tokenizers.Tokenizer.from_file(str(FIXTURE / "tokenizer.json"))
REPLACED = "\ufffd"


@given(st.text())
def test_text_survives_the_way_there_and_back(text):
    assert TINY.decode(TINY.encode(text)) == text.encode("utf-8", "replace").decode()


@given(st.lists(st.integers(0, 4095), max_size=30))
def test_any_tokens_read_as_the_tokenizer_itself_reads_them(tokens):
    whole = BACKEND.decode(tokens)
    found = TINY.decode(tokens)
    assert found == whole or (whole.startswith(found) and whole[len(found) :] == REPLACED)  # cut in a character


@pytest.mark.parametrize("text", ["你好，世界", "naïve café", "👩‍👩‍👧 🏳️‍🌈", "mixed: 語 and é"])
def test_no_half_character_is_shown(text):
    detokenizer, shown = TINY.detokenizer(), ""
    tokens = TINY.encode(text)
    assert len(tokens) > len(text) / 2
    for token in tokens:
        shown += detokenizer.add(token)
        assert text.startswith(shown)  # so it holds no replacement character
    assert shown == text


@pytest.mark.parametrize("text", ["a語b", "naïve 🙂"])
def test_an_output_that_goes_on_within_a_character_ends_it(text):
    tokens = TINY.encode(text)
    for cut in range(len(tokens) + 1):
        rest = TINY.detokenizer(tokens[:cut])
        assert TINY.decode(tokens[:cut]) + "".join(map(rest.add, tokens[cut:])) == text


def test_a_character_that_is_not_finished_is_left_out():
    tokens = TINY.encode("a語")
    assert TINY.decode(tokens[:-1]) == "a"


def test_special_tokens_and_those_beyond_the_tokenizer_have_no_text():
    assert TINY.decode([0, 1, 2, 4096, 99999]) == ""


def test_a_conversation_is_written_as_the_template_says():
    tokens = TINY.encode_chat([{"role": "user", "content": "hi"}])
    assert (
        BACKEND.decode(tokens, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    closed = TINY.encode_chat([{"role": "user", "content": "hi"}], prompt=False)
    assert tokens[: len(closed)] == closed
    assert tokens[0] == 1  # one token, not the text of it


def test_text_parts_are_put_together_line_by_line():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert TINY.encode_chat([{"role": "user", "content": parts}]) == TINY.encode_chat(
        [{"role": "user", "content": "one\ntwo"}]
    )


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, "text", {"type": "text", "text": 3}]
)
def test_a_part_that_is_not_text_is_refused(part):
    with pytest.raises(RequestError, match="message 1 has a part that is not text"):
        TINY.encode_chat([{"role": "user", "content": "x"}, {"role": "user", "content": [part]}])


# --- checkpoints ------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """Writes the files of a checkpoint; a file of None is not there."""

    def write(**files):
        (tmp_path / "tokenizer.json").write_bytes((FIXTURE / "tokenizer.json").read_bytes())
        for name, content in files.items():
            path = tmp_path / (name.replace("__", ".") if "__" in name else f"{name}.json")
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return write


def test_end_tokens_come_from_the_generation_config_and_the_tokenizer(checkpoint):
    eos = {"content": "<|im_end|>", "special": True}
    folder = checkpoint(generation_config={"eos_token_id": [0, 5]}, tokenizer_config={"eos_token": eos})
    assert Tokenizer.load(folder).end_ids == {0, 5, 2}


def test_end_tokens_of_the_model_are_used_where_there_is_no_generation_config(checkpoint):
    assert Tokenizer.load(checkpoint(config={"eos_token_id": 7})).end_ids == {7}
    assert Tokenizer.load(checkpoint(generation_config={"eos_token_id": 3})).end_ids == {3}


@pytest.mark.parametrize("wrong", ["x", [1, None], -1, 1.5])
def test_end_tokens_that_are_none_are_refused(checkpoint, wrong):
    with pytest.raises(InputError, match=r"config\.json: eos_token_id is .* neither a token nor a list"):
        Tokenizer.load(checkpoint(config={"eos_token_id": wrong}))


def test_a_template_may_stand_in_the_tokenizer_config_and_name_special_tokens(checkpoint):
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ tools | tojson }}"
    names = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    for template in (source, [{"name": "other", "template": "x"}, {"name": "default", "template": source}]):
        tokenizer = Tokenizer.load(checkpoint(tokenizer_config={**names, "chat_template": template}))
        tokens = tokenizer.encode_chat([{"role": "user", "content": "é"}], {"tools": ["é<"]})
        assert BACKEND.decode(tokens, skip_special_tokens=False) == '<|im_start|>é<|im_end|>["é<"]'


def test_a_template_can_refuse_messages_and_cannot_leave_its_sandbox(checkpoint):
    for source, reason in [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[3].content + 'x' }}", "undefined|has no"),
    ]:
        tokenizer = Tokenizer.load(checkpoint(chat_template__jinja=source))
        with pytest.raises(RequestError, match=f"the model's chat template refuses them: .*({reason})"):
            tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_what_is_wrong_with_a_checkpoint_is_said_with_its_file(checkpoint, tmp_path):
    with pytest.raises(InputError, match=r"tokenizer\.json: not found"):
        Tokenizer.load(tmp_path)
    with pytest.raises(InputError, match="chat template: line 1"):
        Tokenizer.load(checkpoint(chat_template__jinja="{% for %}"))
    with pytest.raises(InputError, match=r"chat_template\.jinja: 1048577 bytes, more than"):
        Tokenizer.load(checkpoint(chat_template__jinja="x" * (1 + (1 << 20))))
    folder = checkpoint(chat_template__jinja="")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"chat_template\.jinja: not UTF-8"):
        Tokenizer.load(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match=r"tokenizer_config\.json: not JSON"):
        Tokenizer.load(checkpoint(tokenizer_config="{"))
    with pytest.raises(InputError, match=r"tokenizer_config\.json: not a JSON object"):
        Tokenizer.load(checkpoint(tokenizer_config="[]"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_without_a_template_messages_are_refused(checkpoint):
    with pytest.raises(RequestError, match="no chat template; use /v1/completions"):
        Tokenizer.load(checkpoint()).encode_chat([])


# --- other kinds of tokenizer -----------------------------------------------------------------------


def sentence_piece():
    vocabulary = {
        "<unk>": 0,
        **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)},
        "▁hello": 257,
        "▁": 258,
        "wor": 259,
    }
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


def test_sentence_piece_tokens_continue_the_prompt_with_their_space():
    tokenizer = Tokenizer(sentence_piece(), [])
    snowman = [byte + 1 for byte in "☃".encode()]
    tokens = [257, 258, 259, *snowman, 257]
    assert tokenizer.decode(tokens) == " hello wor☃ hello"
    assert sentence_piece().decode(tokens) == "hello wor☃ hello"  # of a whole text it strips the first space
    assert tokenizer.decode([*snowman[:2]]) == ""


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused():
    backend = Backend(models.WordPiece({"[UNK]": 0, "##a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match="a decoder of WordPiece; only byte-level BPE"):
        Tokenizer(backend, [])
