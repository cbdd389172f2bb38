"""What the source of routed experts relies on: vLLM's encoding, and transformers' places of MoE layers."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.core import ModelGeometry
from coterie.model_config import ModelConfig, read_model_config
from coterie.wire import read_routed_experts
from traces import random_ids


@pytest.mark.parametrize(("experts", "dtype"), [(64, np.uint8), (300, np.uint16)])
def test_what_vllm_encodes_is_read(engine_python, tmp_path, experts, dtype):
    geometry = ModelGeometry(layers=3, experts=experts, top_k=2)
    rows = np.zeros((40, 5, 2), dtype)
    rows[:, [1, 2, 4]] = random_ids(np.random.default_rng(0), 40, geometry)
    np.save(tmp_path / "ids.npy", rows)
    text = engine_python("encode_routed.py", tmp_path / "ids.npy").splitlines()[-1]
    read = read_routed_experts(text, geometry, model_layers=5, moe_layers=(1, 2, 4))
    np.testing.assert_array_equal(read, rows[:, [1, 2, 4]])


def test_moe_layers_are_where_transformers_builds_them(built):
    folder, report = built
    assert len(report) > 20
    for name, (hidden, layers, experts, top_k) in report.items():
        expected = ModelConfig(name, ModelGeometry(len(layers), experts, top_k), hidden, tuple(layers))
        assert read_model_config(folder / name) == expected
