"""Counts from the plugin beside counts from transformers, and how they may differ."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np

from coterie.wire import OUTPUT_KEY, PROMPT_KEY, decode_counts

ROOT = Path(__file__).resolve().parents[2]


def prompts() -> list[str]:
    """Plain prompts of all domains, in the order of the example file."""
    lines = (ROOT / "examples" / "prompts" / "serve.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["prompt"] for row in map(json.loads, lines) if "prompt" in row]


def complete(url: str, prompt: str | list[int], **fields) -> dict:
    """A greedy completion of fixed length, with its token ids."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask_counts(url: str, prompt: str | list[int], **fields):
    """(prompt counts, output counts, prompt ids, output ids) of a plain request."""
    reply = complete(url, prompt, kv_transfer_params={"coterie": "counts"}, **fields)
    params = reply["kv_transfer_params"]
    choice = reply["choices"][0]
    return (
        decode_counts(params[PROMPT_KEY]),
        decode_counts(params[OUTPUT_KEY]),
        choice["prompt_token_ids"],
        choice["token_ids"],
    )


def transformers_counts(engine_python, model: Path, texts: list[list[int]], folder: Path):
    """`counts` and `near`, both `[N, L, E]`; see `inside/router_counts.py`."""
    (folder / "ids.json").write_text(json.dumps(texts))
    engine_python("router_counts.py", model, folder / "ids.json", folder / "counts.npz")
    with np.load(folder / "counts.npz") as file:
        return file["counts"], file["near"]


def assert_same_routing(counts: np.ndarray, oracle: np.ndarray, near: np.ndarray) -> None:
    """Every layer sums alike, and only experts at a tie of gate logits may differ."""
    np.testing.assert_array_equal(counts.sum(-1), oracle.sum(-1))
    different = counts.astype(int) != oracle
    assert not (different & ~near).any(), np.argwhere(different & ~near)


def metric(url: str, name: str) -> float:
    """Sum of an engine's metric over its labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    assert values, f"{url} has no metric {name}"
    return sum(values)
