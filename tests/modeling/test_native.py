"""The compiled kernel: that it was built, that it takes nothing it cannot hold, and its parts one by one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from coterie.modeling import native
from coterie.modeling.experts import ExpertWeights
from coterie.modeling.gates import Choice
from coterie.modeling.kernels import kernels
from coterie.modeling.native import load_native
from coterie.modeling.numpy_kernel import NumpyKernel
from coterie.modeling.tiles import block_columns, width_of
from coterie.native import LEVELS


def floats(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def test_where_there_is_a_compiler_the_kernel_is_there():
    names = [kernel.name for kernel in kernels()]
    assert names[-1] == "numpy"
    left_out = shutil.which("cc") is None or os.environ.get("COTERIE_NATIVE") == "0"
    assert left_out or "native portable" in names, "run `make install`"


def test_every_level_is_built_by_the_hook():
    hook = (Path(__file__).parents[2] / "hatch_build.py").read_text()
    assert all(f'"{level}": ' in hook for level in LEVELS)


def test_a_library_of_another_interface_is_left_alone(monkeypatch):
    monkeypatch.setattr(native, "_INTERFACE", 1000)
    assert [kernel.name for kernel in kernels()] == ["numpy"]


def test_a_file_that_is_no_library_is_left_alone(monkeypatch, tmp_path):
    (tmp_path / "kernel-portable.so").write_bytes(b"not a library")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    assert load_native("portable") is None


@pytest.mark.parametrize("columns", [1, 16, 100, 257])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 21])
def test_a_product_is_that_of_the_whole_matrices(any_kernel, tokens, columns):
    rng = np.random.default_rng(columns)
    rows, matrix = floats(rng, tokens, 40), floats(rng, 40, columns)
    result = any_kernel.product(rows, block_columns(matrix, width_of(columns)), columns)
    np.testing.assert_allclose(result, rows.astype(float) @ matrix.astype(float), atol=1e-4)


def test_a_row_of_a_product_has_the_same_bits_beside_any_number_of_rows(any_kernel):
    rng = np.random.default_rng(3)
    rows, blocks = floats(rng, 40, 72), block_columns(floats(rng, 72, 300), 256)
    whole = any_kernel.product(rows, blocks, 300)
    for count in range(1, 40):
        np.testing.assert_array_equal(any_kernel.product(rows[:count], blocks, 300), whole[:count])


def test_each_head_is_multiplied_by_its_own_matrix(any_kernel):
    rng = np.random.default_rng(0)
    rows, matrices = floats(rng, 19, 3, 9)[..., 1:], floats(rng, 3, 8, 5)
    expected = np.einsum("thk,hkn->thn", rows, matrices)
    np.testing.assert_allclose(any_kernel.product_by_head(rows, matrices), expected, atol=1e-5)


@pytest.mark.parametrize("size", [4, 16, 32, 37])
def test_norms_and_rotations_are_numpy_s(any_kernel, size):
    rng, numpy = np.random.default_rng(size), NumpyKernel()
    values, weight = floats(rng, 7, 3, size + 2)[..., :size], floats(rng, size)
    expected = numpy.rms_norm(values, weight, 1e-6)
    np.testing.assert_allclose(any_kernel.rms_norm(values, weight, 1e-6), expected, rtol=1e-6)
    angles = floats(rng, 2, 7, 1, size // 2)
    even = values[..., : size // 2 * 2]
    np.testing.assert_allclose(any_kernel.rotate(even, *angles), numpy.rotate(even, *angles), rtol=1e-6, atol=1e-6)


def test_silu_is_exact_to_a_few_units_in_the_last_place(any_kernel):
    # D = 64: row x has gates x[0..63] = x and ups 1, so that y = silu(x), one column each
    x = np.linspace(-90, 90, 64 * 50, dtype=np.float32).reshape(50, 64)
    rows = np.concatenate((x, np.ones((50, 1), np.float32)), axis=1)
    gate_up, down = np.zeros((1, 1, 65, 128), np.float32), np.zeros((1, 1, 64, 65), np.float32)
    gate_up[0, 0, :64, :64], gate_up[0, 0, 64, 64:], down[0, 0, :, :64] = np.eye(64), 1, np.eye(64)
    result = any_kernel.dense(rows, ExpertWeights(gate_up, down))[:, :64]
    exact = x.astype(float) / (1 + np.exp(-x.astype(float)))
    np.testing.assert_allclose(result, exact, rtol=1e-6, atol=1e-35)


@pytest.fixture
def compiled():
    """The best compiled kernel."""
    found = next(kernels())
    if found.name == "numpy":
        pytest.skip("there is no compiled kernel")
    return found


@pytest.mark.parametrize(
    "rows",
    [np.zeros((2, 8)), np.zeros((2, 9), np.float32), np.zeros((2, 2, 4), np.float32)],
    ids=["dtype", "size", "rank"],
)
def test_arrays_that_do_not_fit_are_refused(compiled, rows):
    with pytest.raises(ValueError, match=r"array \(2, .*, not a contiguous one of float32 \(2, 8\)"):
        compiled.product(rows, np.zeros((1, 8, 16), np.float32), 16)


@pytest.mark.parametrize("expert", [-2, 4])
def test_experts_that_there_are_not_are_refused(compiled, expert):
    weights = ExpertWeights(np.zeros((4, 1, 8, 128), np.float32), np.zeros((4, 1, 64, 8), np.float32))
    choice = Choice(np.array([[0, expert]]), np.ones((1, 2), np.float32))
    with pytest.raises(ValueError, match="of 4 experts"):
        compiled.routed(np.zeros((1, 8), np.float32), choice, weights)
