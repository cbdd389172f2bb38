"""Random models of every architecture, prepared once."""

from __future__ import annotations

import pytest

from coterie.modeling import Model, prepare
from tiny_checkpoints import ARCHITECTURES, write_checkpoint


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A random model of each architecture, by its name."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: Model.open(prepare(write_checkpoint(root / name, name), root / name / "packed")) for name in ARCHITECTURES
    }
