"""The demo's sums, by hand, and its client against a small real server."""

import asyncio
import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from coterie.calibration.prompts import Prompt
from coterie.errors import InputError
from coterie.metrics import RequestTimeline
from coterie.up import demo
from coterie.up.demo_client import Served, serve_all

CODE, KJV = (Prompt(f"serve.jsonl:{i}", label, "text", None) for i, label in ((1, "code"), (2, "kjv")))


def served(id_, prompt, tokens, sent_s=0.0, first_s=1.0, last_s=2.0):
    return Served(id_, prompt, tokens, RequestTimeline(sent_s, first_s, last_s, len(tokens)))


def test_a_report_sums_up_one_policy():
    tally = demo._Tally(cpu_s=0.6)
    tally.served = [
        served("a", CODE, (1, 2, 3), last_s=3.0),  # TTFT 1 s, TPOT 2 s / 2
        served("b", CODE, (1, 2, 3), sent_s=0.5, last_s=5.0),  # TTFT 0.5 s, TPOT 4 s / 2
        Served("c", KJV, (), None, "status 500"),
    ]
    tally.workers = {"a": "decode-0", "b": "decode-1", "c": "decode-1"}
    report = demo._report_policy("locality", tally)
    assert (report.requests, report.errors) == (3, 1)
    assert report.ttft_p50_ms == 750.0
    assert report.tpot_p50_ms == 1500.0
    assert report.tpot_p99_ms == pytest.approx(1990.0)  # 1000 + 0.99 x 1000
    assert report.decode_cpu_ms_per_token == pytest.approx(100.0)  # 0.6 s / 6 tokens
    assert report.worker_shares == {"decode-0": 1 / 3, "decode-1": 2 / 3}
    assert report.domain_shares == {"code": 0.5, "kjv": 1.0}


def test_a_policy_under_which_all_failed_has_no_times():
    tally = demo._Tally(served=[Served("a", CODE, (), None, "status 503")])
    report = demo._report_policy("least_load", tally)
    assert (report.errors, report.tpot_p50_ms, report.decode_cpu_ms_per_token) == (1, None, None)


def test_outputs_are_compared_prompt_by_prompt_across_policies():
    first = demo._Tally(served=[served("a-0", CODE, (1, 2)), served("a-1", KJV, (3, 4))])
    second = demo._Tally(served=[served("b-1", KJV, (3, 5)), served("b-0", CODE, (1, 2))])
    report = demo._report({"a": first, "b": second})
    assert (report.outputs_equal, report.outputs_different) == (1, 1)
    assert report.first_errors == ()


def test_requests_are_a_seeded_shuffle_without_repetition(tmp_path):
    file = tmp_path / "serve.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(6)))

    def texts(**options):
        return [prompt.text for prompt in demo._choose(demo.DemoOptions(file, file, **options))]

    assert texts(requests=5) == texts(requests=5)
    assert len(set(texts(requests=6))) == 6
    assert len({tuple(texts(requests=6, seed=seed)) for seed in range(5)}) > 1
    with pytest.raises(InputError, match=r"requests is 7; .* has prompts for 2 to 6"):
        texts(requests=7)


# --- the client --------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.seen.append((self.headers["x-request-id"], self.rfile.read(int(self.headers["content-length"]))))
        status, text = self.server.answers.popleft()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def ask():
    """Serve one prompt with this answer; returns what became of it and what the server saw."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.answers, server.seen = deque(), []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def ask_once(status, text, prompt=CODE, max_tokens=3):
            server.answers.append((status, text))
            url = f"http://127.0.0.1:{server.server_port}"
            done = []
            going = serve_all(
                url, "tiny", [("r", prompt)], max_tokens=max_tokens, concurrency=1, advance=lambda: done.append(1)
            )
            result = asyncio.run(going)
            assert done == [1]
            return result[0], server.seen[-1]

        yield ask_once
        server.shutdown()
        thread.join()


def stream(*chunks, end="data: [DONE]\n\n"):
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


def tokens(*ids):
    return {"choices": [{"index": 0, "text": "", "token_ids": list(ids)}]}


def test_tokens_are_counted_by_id_even_where_their_text_is_empty(ask):
    result, (id_, body) = ask(200, stream({"choices": [{"delta": {"role": "assistant"}}]}, tokens(5), tokens(6, 7)))
    assert result.tokens == (5, 6, 7)
    assert result.timeline.output_tokens == 3
    assert id_ == "r"
    sent = json.loads(body)
    assert (sent["prompt"], sent["stream"], sent["temperature"], sent["ignore_eos"]) == ("text", True, 0, True)


@pytest.mark.parametrize(
    ("status", "text", "problem"),
    [
        (503, '{"error": "no worker"}', 'status 503: {"error": "no worker"}'),
        (200, stream(tokens(1), end=""), "the stream ended before its [DONE]"),
        (200, stream(tokens(1), {"error": {"message": "lost"}}), "{'message': 'lost'}"),
        (200, stream(tokens(1, 2)), "2 tokens instead of 3"),
    ],
)
def test_a_failed_request_is_a_result_with_its_reason(ask, status, text, problem):
    result, _ = ask(status, text)
    assert result.error == problem
    assert result.timeline is None
