"""Paths that the tests on real vLLM share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "coterie-tiny"
