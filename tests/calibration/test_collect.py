"""`coterie collect` against a small real HTTP server that answers as vLLM with the plugin does.

See test_collect_resumed for collections that were cut short.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from collecting import LINES, counts_of, ids_of

from coterie.activations import ActivationTrace
from coterie.calibration.prompts import read_prompts
from coterie.core import ExpertCounts, ModelGeometry, prompt_hash
from coterie.errors import EngineError, InputError, UnsupportedError
from coterie.wire import encode_counts, encode_ids


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


def test_prompts_nested_too_deep_are_refused(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"messages":[{"a":' + "[" * 100_000 + "]" * 100_000 + "}]}")
    with pytest.raises(InputError, match=r"p\.jsonl:1"):
        read_prompts(prompts)
