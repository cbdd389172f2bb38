#!/usr/bin/env python3
"""Check the plugin on a running vLLM server, such as one on a GPU.

    python3 scripts/gpu_check.py --server http://HOST:PORT [--oracle http://HOST:PORT] [--prompts FILE] [--json]

`--server` is a vLLM server that runs the counts connector.  `--oracle` is another server of the same model,
started with vLLM's own `--enable-return-routed-experts` and without a KV connector, which vLLM refuses beside it.
Each check is one line; the exit status is 0 only if none failed.

    conservation   each layer's counts sum to tokens x top-k, for prompts and outputs
    repeat         a prompt that hits the prefix cache counts as it did cold
    concurrent     prompts sent together count as they did alone
    handoff        a PD prefill reply carries the counts beside the KV connector's own fields
    ids            the ids of the output's tokens come back and add up to its counts
    overhead       CPU time in the plugin's hooks per engine step
    oracle         the prompt's counts against the routed experts that vLLM returns itself

Kernels on a GPU do not sum in one order, so a token near a tie of two gates may choose differently when it is
batched otherwise.  `repeat`, `concurrent` and `oracle` allow `--tolerance` of the choices to differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from coterie.core import ExpertCounts
from coterie.errors import CoterieError
from coterie.wire import OUTPUT_IDS_KEY, OUTPUT_KEY, PROMPT_KEY, count_ids, decode_counts, read_routed_experts

PROMPTS = Path(__file__).resolve().parent.parent / "examples" / "prompts" / "serve.jsonl"
COUNT = 24
TOKENS = 16


class CheckError(Exception):
    """One check's reason."""


class Server:
    """A vLLM server, by its OpenAI endpoints."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=600, trust_env=False)
        self.model = self.get("/v1/models").json()["data"][0]["id"]

    def get(self, path: str) -> httpx.Response:
        reply = self.http.get(path)
        reply.raise_for_status()
        return reply

    def complete(self, prompt: str, tokens: int, **fields: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        reply = self.http.post("/v1/completions", json={**body, **fields})
        if reply.status_code != 200:
            raise CheckError(f"status {reply.status_code}: {reply.text[:300]}")
        answer: dict[str, Any] = reply.json()
        return answer

    def counts(self, prompt: str, tokens: int = 1) -> tuple[ExpertCounts, ExpertCounts]:
        params = self.complete(prompt, tokens, kv_transfer_params={"coterie": "counts"}).get("kv_transfer_params")
        if not params or PROMPT_KEY not in params:
            raise CheckError("the reply has no counts: start the server with CountsConnector (docs/plugin.md)")
        return decode_counts(params[PROMPT_KEY]), decode_counts(params[OUTPUT_KEY])

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        if not lines:
            raise CheckError(f"the server has no metric {name}")
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def moved(a: ExpertCounts, b: ExpertCounts) -> float:
    """Share of choices that differ between two counts of the same tokens."""
    if a.tokens != b.tokens or a.geometry != b.geometry:
        raise CheckError(f"{a.tokens} tokens, {a.geometry}; then {b.tokens} tokens, {b.geometry}")
    return float(np.abs(a.counts.astype(int) - b.counts).sum() / 2 / max(a.counts.sum(), 1))


class Checks:
    """The checks of the module's docstring, in order."""

    def __init__(self, server: Server, oracle: Server | None, prompts: list[str], tolerance: float) -> None:
        self.server, self.oracle, self.prompts, self.tolerance = server, oracle, prompts, tolerance
        self.first: list[ExpertCounts] = []

    def conservation(self) -> str:
        answers = [self.server.counts(prompt, TOKENS) for prompt in self.prompts]
        self.first = [prompt for prompt, _ in answers]
        partial = [i for i, (prompt, output) in enumerate(answers) if not (prompt.complete and output.complete)]
        if partial:
            raise CheckError(f"prompts {partial} were counted in part")
        return f"{len(answers)} prompts, {sum(p.tokens for p in self.first)} tokens, {self.first[0].geometry}"

    def repeat(self) -> str:
        hits = self.server.metric("vllm:prefix_cache_hits_total")
        again = [self.server.counts(prompt)[0] for prompt in self.prompts]
        hit = self.server.metric("vllm:prefix_cache_hits_total") - hits
        if not hit:
            raise CheckError("no prefix was hit: send longer prompts, or enable prefix caching")
        return f"{self._worst(again)}; {hit:.0f} tokens from the prefix cache"

    def concurrent(self) -> str:
        with ThreadPoolExecutor(len(self.prompts)) as pool:
            return self._worst(list(pool.map(lambda prompt: self.server.counts(prompt)[0], self.prompts)))

    def handoff(self) -> str:
        reply = self.server.complete(
            self.prompts[0], 1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False}
        )
        params = dict(reply.get("kv_transfer_params") or {})
        if PROMPT_KEY not in params:
            raise CheckError("the prefill reply has no counts")
        difference = moved(self.first[0], decode_counts(params.pop(PROMPT_KEY)))
        return f"{difference:.2%} moved; beside the counts: {', '.join(sorted(params)) or 'nothing (no KV connector)'}"

    def ids(self) -> str:
        for prompt in self.prompts:
            reply = self.server.complete(prompt, TOKENS, kv_transfer_params={"coterie": "counts+ids"})
            params = reply.get("kv_transfer_params") or {}
            if params.get(OUTPUT_IDS_KEY) is None:
                raise CheckError("a reply has no ids of its output; see the server's log")
            output = decode_counts(params[OUTPUT_KEY])
            read = read_routed_experts(params[OUTPUT_IDS_KEY], output.geometry)
            if not np.array_equal(count_ids(read, output.geometry.experts), output.counts):
                raise CheckError("the ids of an output do not add up to its counts")
        return f"{len(self.prompts)} outputs of {TOKENS} tokens"

    def overhead(self) -> str:
        seconds = self.server.metric("coterie_plugin_hook_cpu_seconds_total")
        steps = self.server.metric("coterie_plugin_steps_total")
        dropped = self.server.metric("coterie_plugin_dropped_total")
        if dropped:
            raise CheckError(f"counts of {dropped:.0f} requests could not be returned; see the server's log")
        return f"{1e6 * seconds / max(steps, 1):.0f} us of CPU time a step, over {steps:.0f} steps"

    def routed_experts(self) -> str:
        if self.oracle is None:
            return "left out: no --oracle given"
        theirs = []
        for mine, prompt in zip(self.first, self.prompts, strict=True):
            choice = self.oracle.complete(prompt, 1)["choices"][0]
            if not choice.get("routed_experts"):
                raise CheckError("the oracle returns no routed_experts; start it with --enable-return-routed-experts")
            ids = read_routed_experts(choice["routed_experts"], mine.geometry)
            theirs.append(ExpertCounts(mine.geometry, count_ids(ids, mine.geometry.experts), len(ids), len(ids)))
        return self._worst(theirs)

    def _worst(self, others: list[ExpertCounts]) -> str:
        worst = max(moved(a, b) for a, b in zip(self.first, others, strict=True))
        if worst > self.tolerance:
            raise CheckError(f"{worst:.2%} of the choices moved, more than {self.tolerance:.2%}")
        return f"at most {worst:.2%} of the choices moved"


def run(checks: list[tuple[str, Callable[[], str]]]) -> list[dict[str, Any]]:
    """Run each check; a failure of one does not stop the others."""
    rows = []
    for name, check in checks:
        try:
            rows.append({"check": name, "ok": True, "detail": check()})
        except (CheckError, CoterieError, httpx.HTTPError, IndexError) as error:
            rows.append({"check": name, "ok": False, "detail": str(error) or type(error).__name__})
        print(f"{'ok  ' if rows[-1]['ok'] else 'FAIL'}  {name:14s} {rows[-1]['detail']}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--oracle")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines with a `prompt` each")
    parser.add_argument("--tolerance", type=float, default=0.01, help="share of choices that may move [default: 0.01]")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lines = map(json.loads, options.prompts.read_text(encoding="utf-8").splitlines())
    prompts = [line["prompt"] for line in lines if "prompt" in line][:COUNT]
    try:
        oracle = Server(options.oracle) if options.oracle else None
        all_ = Checks(Server(options.server), oracle, prompts, options.tolerance)
    except httpx.HTTPError as error:
        sys.exit(f"gpu_check: a server does not answer: {error}")
    rows = run([
        ("conservation", all_.conservation), ("repeat", all_.repeat), ("concurrent", all_.concurrent),
        ("ids", all_.ids), ("handoff", all_.handoff), ("overhead", all_.overhead), ("oracle", all_.routed_experts),
    ])  # fmt: skip
    if options.json:
        print(json.dumps(rows))
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
