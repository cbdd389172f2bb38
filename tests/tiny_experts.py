"""Small random experts of GPT-OSS's kind, whose matrices four bits hold exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LAYERS, EXPERTS, HIDDEN, SIZE = 2, 4, 64, 32
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_SHAPES = {"gate_up_proj": (2 * SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}


def gpt_oss_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Experts as published without quantisation: matrices `[E, in, out]`, biases `[E, out]`."""
    tensors: dict[str, np.ndarray] = {}
    for source, codes, scales in _coded(seed):
        values = _VALUES[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
        tensors[source] = np.ascontiguousarray(values.reshape(*codes.shape[:2], -1).swapaxes(1, 2))
    return tensors | _biases(seed)


def write_gpt_oss(folder: Path, *, mxfp4: bool, **changes: Any) -> Path:
    """Write the experts alone, with a configuration."""
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": LAYERS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": SIZE,
        "hidden_act": "silu",
        "swiglu_limit": 2.0,
    }
    tensors = gpt_oss_tensors()
    if mxfp4:
        config["quantization_config"] = {"quant_method": "mxfp4"}
        tensors = _biases(0)
        for source, codes, scales in _coded(0):
            tensors[f"{source}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
            tensors[f"{source}_scales"] = scales
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _coded(seed: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Names, four-bit codes `[E, rows, groups, 32]` and scales `[E, rows, groups]` of the matrices."""
    rng = np.random.default_rng(seed)
    coded = []
    for layer in range(LAYERS):
        for name, (rows, columns) in _SHAPES.items():
            codes = rng.integers(0, 16, (EXPERTS, rows, columns // 32, 32), np.uint8)
            scales = rng.integers(122, 125, codes.shape[:3], np.uint8)
            coded.append((f"model.layers.{layer}.mlp.experts.{name}", codes, scales))
    return coded


def _biases(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed + 1)
    return {
        f"model.layers.{layer}.mlp.experts.{name}_bias": rng.standard_normal((EXPERTS, rows), np.float32)
        for layer in range(LAYERS)
        for name, (rows, _) in _SHAPES.items()
    }
