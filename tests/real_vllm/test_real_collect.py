"""`coterie collect` from real vLLM and from transformers: the same checkpoint and prompts, the same trace.

Both run in float32 and add in different orders, so they may differ where an oracle finds a tie: experts within
1e-3 of the top-k boundary, and outputs of which some token led the next best by less than 1e-3.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle import ROOT, assert_same_routing
from servers import TINY

from coterie.activations import ActivationTrace

PROMPTS = ROOT / "examples" / "prompts" / "serve.jsonl"
OUTPUT = 12
TIE = 1e-3


def collect(python: Path, file: Path, *options: str) -> ActivationTrace:
    command = [python, "-m", "coterie", "collect", "--json", "--prompts", PROMPTS, "--output", file, *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout)["requests"] == len(PROMPTS.read_text(encoding="utf-8").splitlines())
    return ActivationTrace.load(file)


@pytest.fixture(scope="module")
def served(cluster, tmp_path_factory) -> ActivationTrace:
    options = ("--server", cluster.prefill_urls[0], "--model", "tiny", "--max-tokens", str(OUTPUT), "--ids")
    return collect(Path(sys.executable), tmp_path_factory.mktemp("served") / "served.trace", *options)


@pytest.fixture(scope="module")
def local(engine_env, tmp_path_factory) -> ActivationTrace:
    options = ("--checkpoint", str(TINY), "--model", "tiny", "--max-tokens", str(OUTPUT), "--dtype", "float32")
    return collect(engine_env / "bin" / "python", tmp_path_factory.mktemp("local") / "local.trace", *options)


@pytest.fixture(scope="module")
def oracle(engine_python, tmp_path_factory) -> dict[str, np.ndarray]:
    out = tmp_path_factory.mktemp("oracle")
    engine_python("checkpoint_oracle.py", str(TIE), PROMPTS, str(OUTPUT), out, TINY)
    with np.load(out / f"{TINY.name}.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def sure(oracle) -> np.ndarray:
    """Requests whose output does not hang on a tie of tokens: most."""
    sure = oracle["lead"] >= TIE
    assert sure.mean() > 0.8
    return sure


def test_both_traces_are_of_the_same_texts(served, local):
    assert served.model == local.model
    assert served.geometry == local.geometry
    assert served.prompt_hashes == local.prompt_hashes
    assert served.labels == local.labels
    for lengths in ("prefill_tokens", "prefill_covered", "decode_tokens", "decode_covered"):
        np.testing.assert_array_equal(getattr(served, lengths), getattr(local, lengths))


def test_prompts_choose_the_same_experts(served, local, oracle):
    assert_same_routing(served.prefill, local.prefill.astype(int), oracle["prompt_near"])
    assert_same_routing(local.prefill, oracle["prompt"], oracle["prompt_near"])


def test_outputs_choose_the_same_experts(served, local, oracle, sure):
    near = oracle["output_near"][sure]
    assert_same_routing(served.decode[sure], local.decode[sure].astype(int), near)
    assert_same_routing(local.decode[sure], oracle["output"][sure], near)


def test_each_output_token_chooses_the_same_set(served, local, oracle, sure):
    ids, others = (np.sort(trace.decode_ids.reshape(oracle["ids"].shape), axis=-1) for trace in (served, local))
    same = (ids == others).all(axis=(1, 3))  # of each request and layer
    assert (same | oracle["output_near"].any(-1))[sure].all()
    assert same[sure].mean() > 0.9


def test_the_checkpoint_adds_gate_sums(served, local, oracle):
    assert served.gate_prob is None
    np.testing.assert_allclose(local.gate_prob, oracle["prob"], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(local.gate_logit, oracle["logit"], rtol=1e-5, atol=1e-4)
