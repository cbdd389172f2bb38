"""The forward pass against transformers, on a random checkpoint of each architecture."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from servers import TINY

from coterie.modeling import Model, StepBatch, prepare
from coterie.modeling.gates import SigmoidRule

BLOCK = 16
LENGTHS = (150, 17, 64)
OUTPUT = 40
TIE = 1e-3
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
VARIANTS = {  # what other published checkpoints of the architectures set
    "deepseek_v3-yarn": ("deepseek_v3", {"rope_parameters": YARN, "max_position_embeddings": 256}),
    "qwen3_moe-yarn": ("qwen3_moe", {"rope_parameters": YARN, "norm_topk_prob": True}),
    "mixtral-window": ("mixtral", {"sliding_window": 40}),
}
MADE = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3")
NAMES = (*MADE, *VARIANTS, "coterie-tiny")


@pytest.fixture(scope="module")
def folders(checkpoints, tmp_path_factory):
    """Of checkpoints, by name."""
    folders = {name: checkpoints / name for name in MADE} | {"coterie-tiny": TINY}
    for name, (source, changes) in VARIANTS.items():
        folders[name] = shutil.copytree(checkpoints / source, tmp_path_factory.mktemp("variants") / name)
        config = json.loads((folders[name] / "config.json").read_text())
        (folders[name] / "config.json").write_text(json.dumps({**config, **changes}))
    return folders


@pytest.fixture(scope="module")
def oracle(folders, engine_python, tmp_path_factory):
    """What transformers computes, by name."""
    out = tmp_path_factory.mktemp("oracle")
    lengths = ",".join(map(str, LENGTHS))
    engine_python("forward_oracle.py", out, lengths, max(LENGTHS), OUTPUT, *folders.values())
    return {name: np.load(out / f"{name}.npz") for name in NAMES}


@pytest.fixture(scope="module")
def models(folders, tmp_path_factory):
    root = tmp_path_factory.mktemp("packed")
    return {name: Model.open(prepare(folder, root / name)) for name, folder in folders.items()}


def run(model, tokens, start, kv):
    """One request's tokens from `start` on, with all their logits."""
    positions = np.arange(start, len(tokens))
    rows = np.arange(len(positions))
    table = list(range(len(kv)))
    return model.forward(StepBatch(tokens[start:], positions, [(0, len(positions))], [table], rows), kv)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_logits_and_greedy_tokens_are_those_of_transformers(models, oracle, name, number):
    model, expected = models[name], oracle[name]
    text = expected[f"prompt_{number}"]
    kv = np.zeros(model.kv_shape(12, BLOCK), np.float32)
    output = run(model, text, 0, kv)
    np.testing.assert_allclose(output.logits, expected[f"logits_{number}"], atol=1e-4)
    start = len(text)
    for _ in range(OUTPUT):
        text = np.append(text, output.logits[-1].argmax())
        output = run(model, text, len(text) - 1, kv)
    assert text[start:].tolist() == expected[f"outputs_{number}"].tolist()


def worth(rule, gates, biases):
    """Values by which experts are chosen `[T, L, E]`, and tokens at which no groups tie `[T, L]`."""
    if not isinstance(rule, SigmoidRule):
        return gates, np.ones(gates.shape[:2], bool)
    value = 1 / (1 + np.exp(-gates)) + biases
    groups = value.reshape(*value.shape[:-1], rule.groups, -1)
    of_group = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
    ordered = np.sort(of_group, axis=-1)
    least, next_best = ordered[..., -rule.top_groups], ordered[..., -rule.top_groups - 1]
    inside = np.where((of_group >= least[..., None])[..., None], groups, -np.inf)
    return inside.reshape(value.shape), least - next_best > TIE


def biases_of(checkpoint, config):
    if not isinstance(config.gate, SigmoidRule):
        return None
    tensors = load_file(checkpoint / "model.safetensors")
    return np.stack([tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] for layer in config.moe_layers])


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_the_best_but_at_ties(models, folders, oracle, name):
    model, top_k = models[name], models[name].geometry.top_k
    biases = biases_of(folders[name], model.config)
    value, clear = worth(model.config.gate, oracle[name]["gates_0"], biases)
    kv = np.zeros(model.kv_shape(12, BLOCK), np.float32)
    ids = run(model, oracle[name]["prompt_0"], 0, kv).expert_ids.astype(int)
    worst = np.take_along_axis(value, ids, axis=-1).min(axis=-1)
    best = np.sort(value, axis=-1)[..., -top_k]
    assert (worst >= best - TIE)[clear].all()
    assert clear.mean() > 0.95
    exact = np.sort(np.argsort(-value, axis=-1)[..., :top_k], axis=-1) == np.sort(ids, axis=-1)
    assert exact.mean() > 0.99
