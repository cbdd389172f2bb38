"""The shipped model and the traces recorded of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tiny.measures import locality, purity
from tiny.settings import EXPERTS, LAYERS, TOP_K, VOCABULARY
from tiny.sources import DOMAINS, LANGUAGES, SOURCES, TASKS

from traces import coterie_tiny_trace, tiny_moe_shared_trace, untrained_trace

MODEL = Path(__file__).resolve().parents[2] / "models" / "coterie-tiny"


def test_the_checkpoint_is_whole_and_small() -> None:
    names = {path.name for path in MODEL.iterdir()}
    assert names == {
        "MODEL_CARD.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 20_000_000


def test_the_weights_are_those_that_the_config_describes() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_experts_per_tok"], config["vocab_size"]) == (
        LAYERS,
        TOP_K,
        VOCABULARY,
    )
    with safe_open(MODEL / "model.safetensors", framework="np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        dtypes = {file.get_slice(name).get_dtype() for name in shapes}
    assert dtypes == {"BF16"}
    routers = [shape for name, shape in shapes.items() if name.endswith("mlp.gate.weight")]
    assert routers == [(EXPERTS, config["hidden_size"])] * LAYERS


def test_the_card_names_every_source_with_licence_and_digest() -> None:
    card = (MODEL / "MODEL_CARD.md").read_text()
    for source in SOURCES:
        assert f"| {source.licence} | `{source.package}` {source.version}, `{source.sha256}` |" in card


def test_the_three_traces_are_of_the_same_prompts() -> None:
    trained, untrained, other = coterie_tiny_trace(), untrained_trace(), tiny_moe_shared_trace()
    assert trained.prompt_hashes == untrained.prompt_hashes == other.prompt_hashes
    assert len(set(trained.prompt_hashes)) == len(trained) == 64 * len(DOMAINS)
    assert trained.labels == untrained.labels == other.labels
    assert (trained.prefill_tokens == 256).all()
    assert len(set(other.prefill_tokens)) > 1  # another tokenizer


@pytest.mark.parametrize(("domains", "least"), [(TASKS, 0.15), (LANGUAGES, 0.10)], ids=["tasks", "languages"])
def test_batches_of_one_domain_use_fewer_experts(domains: tuple[str, ...], least: float) -> None:
    trained = locality(coterie_tiny_trace(), domains, np.random.default_rng(1))
    untrained = locality(untrained_trace(), domains, np.random.default_rng(1))
    assert trained.reduction >= least
    assert trained.reduction > 2 * untrained.reduction


def test_clusters_are_of_one_domain() -> None:
    assert purity(coterie_tiny_trace(), np.random.default_rng(1)) >= 0.75
