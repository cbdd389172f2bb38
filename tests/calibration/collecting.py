"""A small real HTTP server that answers as vLLM with the plugin does, and collections from it, for tests."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from coterie.calibration.client import EngineClient
from coterie.calibration.collect import CollectOptions, run_collect
from coterie.calibration.sources.plugin import PluginSource
from coterie.core import ExpertCounts, ModelGeometry
from coterie.wire import encode_counts, encode_ids

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
