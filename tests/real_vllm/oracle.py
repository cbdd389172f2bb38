"""Counts from the plugin beside counts from transformers, and how they may differ."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np

from coterie.wire import OUTPUT_IDS_KEY, OUTPUT_KEY, PROMPT_KEY, count_ids, decode_counts, read_routed_experts

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


def ask_ids(url: str, prompt: str | list[int], **fields):
    """(ids of the output `[T, L, k]`, prompt ids, output ids) of a plain request; the ids count to the envelope."""
    reply = complete(url, prompt, kv_transfer_params={"coterie": "counts+ids"}, **fields)
    params = reply["kv_transfer_params"]
    output, choice = decode_counts(params[OUTPUT_KEY]), reply["choices"][0]
    ids = read_routed_experts(params[OUTPUT_IDS_KEY], output.geometry)
    np.testing.assert_array_equal(count_ids(ids, output.geometry.experts), output.counts)
    return ids, choice["prompt_token_ids"], choice["token_ids"]


def transformers_ids(engine_python, model: Path, texts: list[list[int]], folder: Path):
    """`ids` and `near` of each text: `[T, L, k]` and `[T, L, E]`; see `inside/router_counts.py`."""
    transformers_counts(engine_python, model, texts, folder)
    ends = np.cumsum([len(text) for text in texts])[:-1]
    with np.load(folder / "counts.npz") as file:
        return np.split(file["ids"], ends), np.split(file["token_near"], ends)


def assert_same_ids(ids: np.ndarray, oracle: np.ndarray, near: np.ndarray) -> None:
    """Each token chooses the same set of experts, but for those at a tie of gate logits."""
    assert ids.shape == oracle.shape
    chosen, expected = np.zeros(near.shape, bool), np.zeros(near.shape, bool)
    np.put_along_axis(chosen, ids.astype(int), True, axis=-1)
    np.put_along_axis(expected, oracle, True, axis=-1)
    assert not ((chosen != expected) & ~near).any()


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
