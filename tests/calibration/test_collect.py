"""`coterie collect` against a small real HTTP server that answers as vLLM with the plugin does."""

import asyncio
import errno
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from coterie.activations import ActivationTrace, TraceRecord
from coterie.calibration.client import EngineClient
from coterie.calibration.collect import CollectOptions, run_collect
from coterie.calibration.journal import Header, Journal
from coterie.calibration.prompts import read_prompts
from coterie.calibration.sources.plugin import PluginSource
from coterie.core import ExpertCounts, ModelGeometry, prompt_hash
from coterie.errors import EngineError, InputError, TraceError, UnsupportedError
from coterie.wire import count_ids, encode_counts, encode_ids
from traces import random_ids

GEOMETRY = ModelGeometry(layers=2, experts=8, top_k=2)
LINES = [
    {"prompt": "def f():", "label": "code"},
    {"prompt": "In the beginning", "label": "kjv"},
    {"messages": [{"role": "user", "content": "Guten Tag"}], "label": "de"},
    {"prompt": "no label"},
]


def counts_of(text, tokens, covered=None):
    """Counts that depend on the text: every token chooses the same two experts."""
    covered = tokens if covered is None else covered
    first = sum(text.encode()) % 7
    counts = np.zeros((2, 8), dtype=np.uint8)
    counts[:, [first, first + 1]] = covered
    return ExpertCounts(GEOMETRY, counts, tokens, covered)


def ids_of(text, tokens):
    """Ids that count to `counts_of(text, tokens)`."""
    first = sum(text.encode()) % 7
    return np.tile([first + 1, first], (tokens, 2, 1))


class Engine(ThreadingHTTPServer):
    """Answers prompts of `len(text)` tokens; `script` may change the answer to the n-th request."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies = []
        self.script = {}
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path, body):
        with self.lock:
            self.bodies.append((path, body))
            change = self.script.get(len(self.bodies))
        text = body["prompt"] if path == "/v1/completions" else body["messages"][0]["content"]
        n = body["max_tokens"]
        params = {
            "coterie": encode_counts(counts_of(text, len(text))),
            "coterie_output": encode_counts(counts_of(text, n, n - 1)),
        }
        if body.get("kv_transfer_params") == {"coterie": "counts+ids"}:
            params["coterie_output_ids"] = encode_ids(ids_of(text, n - 1), GEOMETRY.experts)
        reply = {"kv_transfer_params": params, "usage": {"completion_tokens": n, "prompt_tokens": len(text)}}
        return change(reply) if change else (200, reply)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status, reply = self.server.answer(self.path, body)
        if status is None:
            self.close_connection = True
        else:
            self.reply(status, reply)

    def reply(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Silent:
    def __init__(self):
        self.begun = None
        self.advanced = 0
        self.notices = []

    def begin(self, total, done):
        self.begun = (total, done)

    def advance(self):
        self.advanced += 1

    def notice(self, text):
        self.notices.append(text)


@pytest.fixture(scope="module")
def server():
    with Engine() as engine:
        thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield engine
        engine.shutdown()
        thread.join()


@pytest.fixture
def engine(server):
    server.bodies.clear()
    server.script.clear()
    return server


class Collection:
    """One output folder, collected into once or more often."""

    def __init__(self, engine, folder):
        self.engine = engine
        self.prompts = folder / "prompts.jsonl"
        self.output = folder / "out.trace"
        self.partial = folder / "out.trace.partial"
        self.report = Silent()
        self.waits = []
        self.write(LINES)

    def write(self, lines):
        self.prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(self, **changes):
        self.report = Silent()
        options = {"prompts": self.prompts, "output": self.output, "max_tokens": 5}
        server, model = changes.pop("server", self.engine.url), changes.pop("model", None)
        ids = changes.pop("ids", False)

        async def sleep(seconds):
            self.waits.append(seconds)

        source = PluginSource(EngineClient(server, notice=self.report.notice, sleep=sleep), model, ids=ids)
        return asyncio.run(run_collect(source, CollectOptions(**{**options, **changes}), self.report))


@pytest.fixture
def collection(engine, tmp_path):
    return Collection(engine, tmp_path)


def test_the_trace_holds_every_prompt_in_the_order_of_the_file(collection):
    trace = collection.run()
    assert ActivationTrace.load(collection.output).digest() == trace.digest()
    assert trace.model == "tiny"
    assert trace.labels == ("code", "kjv", "de", "")
    assert trace.prompt_hashes[0] == prompt_hash("def f():")
    assert trace.prompt_hashes[2] == prompt_hash(LINES[2]["messages"])
    assert trace.prefill_tokens.tolist() == [8, 16, 9, 8]
    assert trace.decode_tokens.tolist() == [5] * 4
    assert trace.decode_covered.tolist() == [4] * 4  # the last token is never forwarded
    assert np.array_equal(trace.prefill[1], counts_of("In the beginning", 16).counts)
    assert not collection.partial.exists()
    assert collection.report.begun == (4, 0)
    assert collection.report.advanced == 4


def test_requests_are_greedy_of_fixed_length_and_ask_for_counts(collection):
    collection.run()
    paths = sorted(path for path, _ in collection.engine.bodies)
    assert paths == ["/v1/chat/completions"] + ["/v1/completions"] * 3
    for _, body in collection.engine.bodies:
        assert body["model"] == "tiny"
        assert (body["temperature"], body["ignore_eos"], body["max_tokens"]) == (0, True, 5)
        assert body["kv_transfer_params"] == {"coterie": "counts"}
        assert "stream" not in body


def test_the_order_of_sending_is_seeded(collection):
    def order(seed):
        collection.engine.bodies.clear()
        collection.run(seed=seed, concurrency=1, force=True)
        return [body.get("prompt") for _, body in collection.engine.bodies]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(6)}) > 1


# --- crashes -----------------------------------------------------------------------------------------


def crash_after(collection, requests):
    """Run until `requests` are kept, then fail; returns the partial file's bytes."""
    collection.engine.bodies.clear()
    collection.engine.script = {requests + 1: lambda _: (500, {"error": {"message": "out of memory"}})}
    with pytest.raises(EngineError, match="answered 500: out of memory"):
        collection.run(concurrency=1)
    collection.engine.script = {}
    collection.engine.bodies.clear()
    return collection.partial.read_bytes()


@pytest.mark.parametrize("done", range(len(LINES)))
def test_a_crash_after_any_request_costs_only_the_rest(collection, done):
    crash_after(collection, done)
    trace = collection.run()
    assert len(collection.engine.bodies) == len(LINES) - done
    assert collection.report.begun == (4, done)
    assert trace.prefill_tokens.tolist() == [8, 16, 9, 8]


def test_a_last_line_cut_anywhere_is_dropped_and_said(collection):
    whole = crash_after(collection, 3)
    last = whole.rstrip().rindex(b"\n") + 1
    for cut in range(last + 1, len(whole), 97):
        collection.partial.write_bytes(whole[:cut])
        collection.engine.bodies.clear()
        collection.run(force=True)
        assert len(collection.engine.bodies) == 2
        assert "cut short" in collection.report.notices[0]


def test_a_line_that_is_no_cut_header_is_left_alone(collection):
    collection.partial.write_text("my shopping list")
    with pytest.raises(TraceError, match="was begun with another format"):
        collection.run()
    assert collection.partial.read_text() == "my shopping list"


def test_a_cut_header_begins_again(collection):
    collection.partial.write_bytes(b'{"model":"ti')
    assert len(collection.run()) == 4


def test_damage_before_the_last_line_is_an_error_naming_it(collection):
    lines = crash_after(collection, 3).split(b"\n")
    lines[2] = lines[2][:40]
    collection.partial.write_bytes(b"\n".join(lines))
    with pytest.raises(TraceError, match=r"out.trace.partial:3 is damaged .* delete the file"):
        collection.run()
    assert not collection.engine.bodies


@pytest.mark.parametrize("changes", [{"max_tokens": 6}, {"model": "other"}])
def test_a_partial_of_other_settings_is_refused_unless_forced(collection, changes):
    before = crash_after(collection, 2)
    with pytest.raises(TraceError, match=r"was begun with model .tiny.*--force"):
        collection.run(**changes)
    assert collection.partial.read_bytes() == before
    assert not collection.engine.bodies
    collection.run(**changes, force=True)
    assert len(collection.engine.bodies) == 4


def test_a_run_that_finished_nothing_stands_in_no_ones_way(collection):
    crash_after(collection, 0)
    assert collection.partial.read_bytes().count(b"\n") == 1  # its header alone
    assert len(collection.run(model="other", max_tokens=5)) == 4
    assert {body["model"] for _, body in collection.engine.bodies} == {"other"}


def test_a_partial_of_other_prompts_is_refused(collection):
    crash_after(collection, 2)
    collection.write(LINES[::-1])
    with pytest.raises(TraceError, match="was begun with"):
        collection.run()


# --- what the server may do --------------------------------------------------------------------------


def without_plugin(reply):
    return 200, {**reply, "kv_transfer_params": None}


def test_a_server_without_the_plugin_is_named_with_the_flag_to_start_it_with(collection):
    collection.engine.script = {1: without_plugin}
    with pytest.raises(UnsupportedError, match=r"does not run coterie's plugin; start vLLM with --kv-transfer-config"):
        collection.run(concurrency=1)
    assert len(collection.engine.bodies) == 1


def test_a_busy_server_is_asked_again_after_stated_waits(collection):
    busy = {n: lambda _: (503, {"error": {"message": "starting"}}) for n in (1, 2, 3)}
    collection.engine.script = busy
    assert len(collection.run(concurrency=1)) == 4
    assert collection.waits == [1.0, 2.0, 4.0]
    assert collection.report.notices[0] == f"{collection.engine.url} answered 503: starting; next try in 1 s"


def test_a_server_that_stays_busy_is_given_up(collection):
    collection.engine.script = {n: lambda _: (503, {}) for n in range(1, 9)}
    with pytest.raises(EngineError, match="answered 503"):
        collection.run(concurrency=1)
    assert collection.waits == [1.0, 2.0, 4.0, 8.0]


def test_a_connection_that_breaks_is_tried_again(collection):
    collection.engine.script = {2: lambda _: (None, None)}
    assert len(collection.run(concurrency=1)) == 4
    assert collection.waits == [1.0]


def test_an_error_names_the_prompt_and_the_servers_words(collection):
    too_long = {"error": {"message": "maximum context length is 1024"}}
    collection.engine.script = {1: lambda _: (400, too_long)}
    with pytest.raises(EngineError, match=r"prompts.jsonl:\d: .* answered 400: maximum context length is 1024"):
        collection.run(concurrency=1)
    assert collection.waits == []


def test_counts_that_break_conservation_are_refused_and_not_kept(collection):
    def damaged(reply):
        reply["kv_transfer_params"]["coterie"]["covered"] -= 1
        return 200, reply

    collection.engine.script = {1: damaged}
    with pytest.raises(EngineError, match=r"prompts.jsonl:\d: .* damaged counts"):
        collection.run(concurrency=1)
    assert collection.partial.read_bytes().count(b"\n") == 1  # the header alone


def of_fewer_layers(reply):
    for key in ("coterie", "coterie_output"):
        one_layer = ExpertCounts(ModelGeometry(1, 8, 2), np.array([[3, 3, 0, 0, 0, 0, 0, 0]], np.uint8), 3, 3)
        reply["kv_transfer_params"][key] = encode_counts(one_layer)
    return 200, reply


def of_length(tokens):
    def change(reply):
        reply["usage"]["completion_tokens"] = tokens
        return 200, reply

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (of_fewer_layers, "1 layers x 8 experts, top-2, request 0 with 2 layers"),
        (of_length(3), "decode_covered is 4: the output has fewer forwarded tokens"),
        (of_length(10**30), "decode_tokens is 10+: a length is from 0 to"),
    ],
)
def test_an_answer_that_fits_no_trace_is_refused_at_once_and_not_kept(collection, change, problem):
    collection.engine.script = {2: change}
    with pytest.raises(EngineError, match=rf"prompts.jsonl:\d: what was recorded fits no trace: .*{problem}"):
        collection.run(concurrency=1)
    assert collection.partial.read_bytes().count(b"\n") == 2  # the header and the first request
    assert len(collection.run()) == len(LINES)


def test_prompts_are_never_overwritten(collection):
    before = collection.prompts.read_bytes()
    partial = collection.prompts.rename(collection.prompts.with_suffix(".partial"))
    for prompts, output in ((partial, partial), (partial, partial.with_suffix(""))):
        with pytest.raises(InputError, match=r"prompts\.partial is read by this command"):
            collection.run(prompts=prompts, output=output, force=True)
        assert prompts.read_bytes() == before
    assert collection.engine.bodies == []


@pytest.mark.parametrize("end", ["/v1", "/v1/"])
def test_the_url_of_the_api_is_not_that_of_a_server(collection, end):
    with pytest.raises(InputError, match=r"server 'http://.*/v1/?': leave out /v1"):
        collection.run(server=collection.engine.url + end)
    assert not collection.engine.bodies


def test_an_unreachable_server_is_named(collection):
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9/v1/models cannot be reached"):
        collection.run(server="http://127.0.0.1:9")
    assert not collection.partial.exists()


def test_a_partly_covered_prompt_is_recorded_as_such(collection):
    def partly(reply):
        reply["kv_transfer_params"]["coterie"] = encode_counts(counts_of("x", 40, covered=8))
        return 200, reply

    collection.engine.script = {1: partly}
    trace = collection.run(concurrency=1)
    assert trace.complete.sum() == 3
    assert trace.prefill_covered.min() == 8


def test_a_prompt_of_which_nothing_was_counted_stops_the_collection(collection):
    def nothing(reply):
        reply["kv_transfer_params"]["coterie"] = encode_counts(counts_of("x", 40, covered=0))
        return 200, reply

    collection.engine.script = {1: nothing}
    with pytest.raises(EngineError, match=r"prompts.jsonl:\d: none of the prompt's 40 tokens were counted"):
        collection.run(concurrency=1)


# --- ids of the plugin -------------------------------------------------------------------------------


def test_ids_are_asked_for_and_recorded(collection):
    trace = collection.run(ids=True)
    assert {body["kv_transfer_params"]["coterie"] for _, body in collection.engine.bodies} == {"counts+ids"}
    assert trace.decode_ids.shape == (4 * 4, 2, 2)
    np.testing.assert_array_equal(trace.decode_ids[:4], ids_of("def f():", 4))
    assert collection.run(force=True).decode_ids is None


def test_a_collection_with_ids_does_not_go_on_from_one_without(collection):
    crash_after(collection, 2)
    with pytest.raises(TraceError, match=r"counts by the plugin, not with .*counts and ids by the plugin"):
        collection.run(ids=True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda params: params.update(coterie_output_ids=None), "returned no ids of the output.*lower --concurrency"),
        (lambda params: params.pop("coterie_output_ids"), "returned no ids of the output"),
        (lambda params: params.update(coterie_output_ids={"data": ""}), "damaged counts: routed experts"),
        (
            lambda params: params.update(coterie_output_ids=encode_ids(ids_of("another", 4), 8)),
            "damaged counts: the ids of the output do not add up",
        ),
    ],
)
def test_missing_or_wrong_ids_name_the_prompt_and_are_not_kept(collection, change, problem):
    def changed(reply):
        change(reply["kv_transfer_params"])
        return 200, reply

    collection.engine.script = {1: changed}
    with pytest.raises(EngineError, match=rf"prompts.jsonl:\d: .*{problem}"):
        collection.run(ids=True, concurrency=1)
    assert collection.partial.read_bytes().count(b"\n") == 1


# --- what the user may do ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "JSON|truncated"),
        ('{"prompt": 3}', "Expected `str | null`, got `int`"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"messages": []}', "the prompt is empty"),
        ('{"label": "x"}', "either prompt or messages"),
        ('{"prompt": "a", "messages": [{"role": "user"}]}', "either prompt or messages"),
        ('{"prompt": "a", "lable": "x"}', "unknown field `lable`"),
        ("", "a blank line, or an empty file"),
    ],
)
def test_every_line_is_checked_before_anything_is_sent(collection, line, problem):
    good = json.dumps(LINES[0])
    collection.prompts.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(InputError, match=rf"prompts.jsonl:2: .*({problem})"):
        collection.run()
    assert not collection.engine.bodies


def test_a_prompt_file_without_end_is_refused(collection, monkeypatch):
    monkeypatch.setattr("coterie.calibration.prompts._MOST_BYTES", 100)
    with pytest.raises(InputError, match="/dev/zero: more than 100 bytes; collect from fewer prompts"):
        collection.run(prompts=Path("/dev/zero"))


@pytest.mark.parametrize(("status", "problem"), [(200, "something else than JSON"), (400, r"answered 400: \[\[")])
def test_an_answer_nested_too_deep_is_refused(collection, monkeypatch, status, problem):
    monkeypatch.setattr(json, "dumps", lambda _: "[" * 100_000)
    collection.engine.script = {1: lambda reply: (status, reply)}
    with pytest.raises(EngineError, match=problem):
        collection.run(model="tiny", concurrency=1)


def test_an_existing_trace_is_replaced_only_by_force(collection):
    collection.output.write_text("mine")
    with pytest.raises(InputError, match="exists; name another file, or pass --force"):
        collection.run()
    assert collection.output.read_text() == "mine"
    assert len(collection.run(force=True)) == 4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_tokens": 1}, "max_tokens is 1"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"server": "127.0.0.1:8000"}, "is not a URL"),
        ({"server": "http://:80:80"}, "is not a URL"),
    ],
)
def test_an_option_out_of_range_is_refused(collection, changes, problem):
    with pytest.raises(InputError, match=problem):
        collection.run(**changes)


def test_a_full_disk_and_an_unusable_path_are_errors_that_name_the_file(tmp_path, monkeypatch):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}')
    file = read_prompts(prompts)
    with pytest.raises(TraceError, match="cannot be written"):
        Journal(tmp_path, Header("m", file.digest, 8, "counts"), file)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("coterie.calibration.journal.os.fsync", full)
    with (
        Journal(tmp_path / "x.partial", Header("m", file.digest, 8, "counts"), file) as journal,
        pytest.raises(TraceError, match=r"x\.partial: cannot be written: No space left"),
    ):
        journal.load(restart=False, notice=print)


def test_prompts_nested_too_deep_are_refused(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"messages":[{"a":' + "[" * 100_000 + "]" * 100_000 + "}]}")
    with pytest.raises(InputError, match=r"p\.jsonl:1"):
        read_prompts(prompts)


# --- ids and gate values -----------------------------------------------------------------------------


class Rich:
    """A source that records ids and gate sums as well; fails at one prompt if told to."""

    records = "everything"

    def __init__(self, fails_at=None):
        self.asked = 0
        self.fails_at = fails_at

    async def model(self):
        return "rich"

    async def record(self, prompt, max_tokens):
        self.asked += 1
        if self.asked == self.fails_at:
            raise EngineError("out of memory")
        rng = np.random.default_rng(len(prompt.fields.get("prompt", "")))
        ids = random_ids(rng, max_tokens - 1, GEOMETRY)
        output = ExpertCounts(GEOMETRY, count_ids(ids, 8), max_tokens - 1, max_tokens - 1)
        gates = rng.random((2, 8), dtype=np.float32)
        counts = counts_of("x", 9)
        return TraceRecord(counts, output, max_tokens, prompt.hash, prompt.label, ids, gates, gates - 1)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


def test_ids_and_gate_sums_survive_a_crash(collection):
    options = CollectOptions(collection.prompts, collection.output, max_tokens=5, concurrency=1)
    with pytest.raises(EngineError):
        asyncio.run(run_collect(Rich(fails_at=4), options, Silent()))
    source = Rich()
    trace = asyncio.run(run_collect(source, options, Silent()))
    assert source.asked == 1
    assert trace.decode_ids.shape == (4 * 4, 2, 2)
    assert trace.gate_prob.dtype == np.float32
    at_once = asyncio.run(run_collect(Rich(), replace(options, force=True), Silent()))
    assert trace.digest() == at_once.digest()


def test_a_partial_of_another_source_is_refused(collection):
    crash_after(collection, 2)
    options = CollectOptions(collection.prompts, collection.output, max_tokens=5)
    with pytest.raises(TraceError, match=r"counts by the plugin, not with .*everything"):
        asyncio.run(run_collect(Rich(), options, Silent()))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "|O8"}, "not one of"),
        ({"shape": [4, 2, 3]}, "do not fill"),
        ({"shape": [-1, 2, 2]}, "do not fill"),
        ({"shape": [0, 10**30], "data": ""}, "is of no array"),
        ({"dtype": "<f4", "shape": [2, 2, 2], "data": "A" * 43 + "="}, "not whole numbers"),
        ({"data": "AAAA"}, "do not fill"),
        ({"data": "?"}, "base64"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_a_damaged_array_in_the_partial_is_refused(collection, changes, problem):
    options = CollectOptions(collection.prompts, collection.output, max_tokens=5, concurrency=1)
    with pytest.raises(EngineError):
        asyncio.run(run_collect(Rich(fails_at=3), options, Silent()))
    lines = [json.loads(line) for line in collection.partial.read_text().splitlines()]
    lines[1]["decode_ids"].update(changes)
    collection.partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TraceError, match=rf"partial:2 is damaged .*{problem}"):
        asyncio.run(run_collect(Rich(), options, Silent()))
