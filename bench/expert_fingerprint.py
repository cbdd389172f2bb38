#!/usr/bin/env python3
"""How long it takes to tell which checkpoint's experts one has, for checkpoints of the size of large models.

    python3 bench/expert_fingerprint.py [--folder FOLDER]

Writes the configuration and expert tensors of large models as sparse files: names and sizes are true, the bytes are
zeros that take no room on a disk, so that reading them waits for none.  Prints the CPU seconds for reading all headers,
and those for the fingerprint.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from coterie.modeling.expert_tensors import ExpertFiles

MODELS = {
    "Qwen3-30B-A3B": (
        16,
        {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
         "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "decoder_sparse_step": 1},
    ),
    "as DeepSeek-V3, in bfloat16": (
        163,
        {"model_type": "deepseek_v3", "num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8,
         "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "first_k_dense_replace": 3},
    ),
}  # fmt: skip
"""Files, and the part of the configuration that concerns experts."""


def shapes(config: dict[str, object]) -> dict[str, tuple[int, int]]:
    """Of the expert tensors, by name."""
    hidden, size = config["hidden_size"], config["moe_intermediate_size"]
    experts = config.get("n_routed_experts") or config["num_experts"]
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight": shape
        for layer in range(config.get("first_k_dense_replace", 0), config["num_hidden_layers"])
        for expert in range(experts)
        for kind, shape in {
            "gate_proj": (size, hidden), "up_proj": (size, hidden), "down_proj": (hidden, size)
        }.items()
    }  # fmt: skip


def write(folder: Path, files: int, config: dict[str, object]) -> int:
    """Write a checkpoint; the bytes of its tensors."""
    (folder / "config.json").write_text(json.dumps(config))
    names, total, weight_map = list((all_shapes := shapes(config)).items()), 0, {}
    for number in range(files):
        name, end, header = f"{number}.safetensors", 0, {}
        for tensor, shape in names[number * len(names) // files : (number + 1) * len(names) // files]:
            start, end = end, end + 2 * shape[0] * shape[1]
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
            weight_map[tensor] = name
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        total += end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(weight_map) == len(all_shapes)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to make them [default: for temporary files]")
    options = parser.parse_args()
    print(f"{'model':30} {'tensors':>8} {'GB':>6} {'headers s':>10} {'fingerprint s':>14}")
    for name, (files, config) in MODELS.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            total = write(Path(folder), files, config)
            began_s = time.process_time()
            opened = ExpertFiles.open(Path(folder))
            open_s = time.process_time()
            opened.fingerprint()
            ended_s = time.process_time()
            count = len(shapes(config))
        print(f"{name:30} {count:8} {total / 1e9:6.0f} {open_s - began_s:10.2f} {ended_s - open_s:14.2f}")


if __name__ == "__main__":
    main()
