"""Traces as small compressed files, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coterie.activations import ActivationTrace


def write_fixture(trace: ActivationTrace, path: Path) -> None:
    """Write a trace for `tests/traces.py` to read; compressed, which a trace file is not."""
    names = sorted(set(trace.labels))
    geometry = trace.geometry
    np.savez_compressed(
        path,
        geometry=np.array([geometry.layers, geometry.experts, geometry.top_k]),
        prefill=trace.prefill,
        decode=trace.decode,
        decode_ids=trace.decode_ids,
        prefill_tokens=trace.prefill_tokens,
        decode_covered=trace.decode_covered,
        names=np.array(names),
        domain=np.array([names.index(label) for label in trace.labels], dtype=np.uint8),
        prompt_hashes=np.frombuffer(bytes.fromhex("".join(trace.prompt_hashes)), np.uint8).reshape(-1, 16),
    )
