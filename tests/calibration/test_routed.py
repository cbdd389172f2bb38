"""Routed experts from stock servers, told by a small HTTP server that answers in their formats."""

import asyncio
import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from coterie.calibration.client import EngineClient
from coterie.calibration.prompts import Prompt, read_prompts
from coterie.calibration.sources.routed import RoutedSource
from coterie.core import ModelGeometry
from coterie.errors import EngineError, UnsupportedError
from coterie.model_config import ModelConfig
from coterie.wire import count_ids
from traces import random_ids

MODEL = ModelConfig("qwen3_moe", ModelGeometry(layers=3, experts=300, top_k=2), hidden_layers=5, moe_layers=(1, 2, 4))
PROMPT, OUTPUT = 7, 4


def rows_of(rng, tokens=PROMPT + OUTPUT - 1):
    """Rows as engines keep them: all hidden layers, zeros for the dense ones."""
    rows = np.zeros((tokens, MODEL.hidden_layers, MODEL.geometry.top_k), np.int32)
    rows[:, MODEL.moe_layers] = random_ids(rng, tokens, MODEL.geometry)
    return rows


def as_vllm(rows):
    buffer = io.BytesIO()
    np.save(buffer, rows.astype(np.uint16), allow_pickle=False)
    text = base64.b64encode(buffer.getvalue()).decode()
    return {"choices": [{"text": "", "routed_experts": text}], "kv_transfer_params": None}


def as_sglang(rows):
    return {"choices": [{"text": ""}], "sglext": {"routed_experts": base64.b64encode(rows.tobytes()).decode()}}


def as_sglang_meta(rows):
    return {"choices": [{"text": ""}], "meta_info": as_sglang(rows)["sglext"]}


ENGINES = pytest.mark.parametrize("encode", [as_vllm, as_sglang, as_sglang_meta])


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        data = json.dumps(self.server.reply).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def prompt(tmp_path) -> Prompt:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f():", "label": "code"}\n')
    return read_prompts(tmp_path / "prompts.jsonl").prompts[0]


@pytest.fixture
def record(server, prompt):
    async def run():
        client = EngineClient(f"http://127.0.0.1:{server.server_port}", notice=print)
        async with RoutedSource(client, MODEL, "tiny") as source:
            return await source.record(prompt, OUTPUT)

    def answer(reply, prompt_tokens=PROMPT, completion_tokens=OUTPUT):
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        server.reply = {"usage": usage, **reply}
        return asyncio.run(run())

    return answer


@ENGINES
def test_ids_are_counted_over_the_moe_layers_and_split_into_prompt_and_output(record, server, encode):
    rows = rows_of(np.random.default_rng(0))
    found = record(encode(rows))
    expected = rows[:, MODEL.moe_layers]
    assert found.prompt.complete
    assert found.output.complete
    np.testing.assert_array_equal(found.prompt.counts, count_ids(expected[:PROMPT], 300))
    np.testing.assert_array_equal(found.output.counts, count_ids(expected[PROMPT:], 300))
    np.testing.assert_array_equal(found.decode_ids, expected[PROMPT:])
    assert (found.output_tokens, found.label) == (OUTPUT, "code")
    assert server.body["return_routed_experts"] is True
    assert (server.body["temperature"], server.body["ignore_eos"], server.body["max_tokens"]) == (0, True, OUTPUT)


@ENGINES
def test_tokens_that_the_engine_did_not_record_are_not_covered_and_never_counted(record, encode):
    rows = rows_of(np.random.default_rng(1))
    rows[:3] = 0  # a cached prefix that was not recorded
    rows[4, MODEL.moe_layers[1]] = [9, 9]  # left in a buffer
    rows[PROMPT + 1] = 0
    found = record(encode(rows))
    expected = rows[:, MODEL.moe_layers]
    assert (found.prompt.tokens, found.prompt.covered) == (PROMPT, PROMPT - 4)
    assert (found.output.tokens, found.output.covered) == (OUTPUT - 1, OUTPUT - 2)
    np.testing.assert_array_equal(found.prompt.counts, count_ids(expected[[3, 5, 6]], 300))
    np.testing.assert_array_equal(found.decode_ids, expected[[PROMPT, PROMPT + 2]])


def test_nested_lists_of_older_releases_are_read(record):
    rows = rows_of(np.random.default_rng(2))
    reply = record({"choices": [{"routed_experts": rows.tolist()}]})
    assert reply.prompt.complete


@ENGINES
def test_a_prompt_of_which_nothing_was_recorded_stops_the_collection(record, encode):
    rows = rows_of(np.random.default_rng(3))
    rows[:PROMPT] = 0
    with pytest.raises(EngineError, match=r"prompts.jsonl:1: none of the prompt's 7 tokens were counted"):
        record(encode(rows))


@ENGINES
def test_an_id_out_of_range_is_an_error_even_beside_missing_rows(record, encode):
    rows = rows_of(np.random.default_rng(4))
    rows[0, MODEL.moe_layers[0]] = [300, 300]
    with pytest.raises(EngineError, match=r"prompts.jsonl:1: .*do not fit the model .*outside 0..299"):
        record(encode(rows))


@ENGINES
@pytest.mark.parametrize("tokens", [PROMPT + OUTPUT, PROMPT + OUTPUT - 2])
def test_rows_for_other_tokens_than_the_usage_says_are_refused(record, encode, tokens):
    with pytest.raises(EngineError, match=rf"{tokens} rows for 7 prompt and 4 output tokens"):
        record(encode(rows_of(np.random.default_rng(5), tokens)))


def test_rows_of_another_model_are_refused(record):
    with pytest.raises(EngineError, match=r"shape \(10, 4, 2\) is not \(tokens, 5, 2\)"):
        record(as_vllm(rows_of(np.random.default_rng(6))[:, :4]))
    with pytest.raises(EngineError, match="not whole rows of 5 layers x 2 int32"):
        record(as_sglang(rows_of(np.random.default_rng(6))[1:, :4].copy()))


@pytest.mark.parametrize("reply", [{"choices": [{"text": ""}]}, {"choices": []}, {"choices": None, "sglext": None}, {}])
def test_a_server_that_returns_none_is_told_how_to_be_started(record, reply):
    with pytest.raises(
        UnsupportedError, match=r"no routed experts; start vLLM with --kv-transfer-config.*SGLang with "
    ):
        record(reply)


def test_a_reply_without_usage_is_an_error(record):
    with pytest.raises(EngineError, match=r"prompts.jsonl:1: .* prompt_tokens"):
        record({**as_vllm(rows_of(np.random.default_rng(7))), "usage": None})
