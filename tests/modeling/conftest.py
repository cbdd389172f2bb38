"""Random models of every architecture, prepared once, under numpy and under the best compiled kernel."""

from __future__ import annotations

import pytest

from coterie.modeling import Model, prepare
from coterie.modeling.kernels import kernels
from tiny_checkpoints import ARCHITECTURES, write_checkpoint

ALL = {kernel.name: kernel for kernel in kernels()}
FIRST_AND_LAST = dict.fromkeys([next(iter(ALL)), "numpy"])  # one where nothing was compiled


@pytest.fixture(scope="session", params=FIRST_AND_LAST)
def kernel(request):
    """What computes."""
    return ALL[request.param]


@pytest.fixture(scope="session", params=ALL)
def any_kernel(request):
    """What computes, every level of instructions that this processor has."""
    return ALL[request.param]


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """A random model's weights file of each architecture, by its name."""
    root = tmp_path_factory.mktemp("models")
    return {name: prepare(write_checkpoint(root / name, name), root / name / "packed") for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def models(packed, kernel):
    """A random model of each architecture, by its name."""
    return {name: Model.open(file, kernel) for name, file in packed.items()}
