"""The arithmetic of counts: compiled code and numpy, each against what it says it computes, and one another."""

from __future__ import annotations

import base64
import copy
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie import native
from coterie.counting import KERNEL, kernels
from coterie.counting import native as counting_native
from coterie.counting.numpy_kernel import NumpyKernel
from coterie.routing.marginal_batches import LEAST_IN_ROW, MOST

ALL = list(kernels())
COMPILED = ALL[:-1]
each_kernel = pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)

# around the number of lanes and of a block, and the pairs of a real model
SIZES = st.sampled_from([1, 3, 15, 16, 17, 64, 65, 255, 256, 257, 6144])

WIDTHS = st.sampled_from([1, 15, 16, 17, 128])
DTYPES = st.sampled_from(["u1", "u2", "u4", "u8"])


def usages(n, seed):
    """Shares as prompts have them: many zeros, some nearly certain."""
    rng = np.random.default_rng(seed)
    share = rng.random(n) ** 3 * (rng.random(n) < 0.6)
    share[rng.random(n) < 0.05] = 1 - 1e-6
    return share.astype(np.float32)


def test_where_there_is_a_compiler_the_kernel_is_there():
    left_out = shutil.which("cc") is None or os.environ.get("COTERIE_NATIVE") == "0"
    assert ALL[-1].name == "numpy"
    assert KERNEL.name == ALL[0].name
    assert left_out or "native portable" in [kernel.name for kernel in ALL], "run `make install`"


def test_a_library_of_another_interface_is_left_alone(monkeypatch):
    monkeypatch.setattr(counting_native, "_INTERFACE", 1000)
    assert [kernel.name for kernel in kernels()] == ["numpy"]


def test_a_file_that_is_no_library_is_left_alone(tmp_path):
    (tmp_path / "kernel-portable.so").write_bytes(b"not a library")
    assert native.open_library(tmp_path, "portable", 1, {}) is None


def test_every_folder_with_a_kernel_is_built():
    root = Path(__file__).parents[2]
    names = sorted(file.parent.name for file in (root / "src" / "coterie").glob("*/kernel.c"))
    assert f"for name in {tuple(names)}".replace("'", '"') in (root / "hatch_build.py").read_text()


@each_kernel
@given(SIZES, st.sampled_from(["u1", "u2", "u4", "u8"]), st.data())
def test_counts_are_kept_if_each_layer_sums_to_the_same_and_none_is_too_great(kernel, experts, dtype, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    counts = np.tile(rng.integers(0, 200, experts), (3, 1)).astype(dtype)
    each, most = int(counts[0].astype(int).sum()), int(counts.max())
    assert kernel.conserves(counts, each, most)
    assert kernel.conserves(np.repeat(counts, 2, axis=0)[::2], each, most)
    assert not most or not kernel.conserves(counts, each, most - 1)
    assert not kernel.conserves(counts, each + (1 << 64), most)
    counts[data.draw(st.integers(0, 2)), data.draw(st.integers(0, experts - 1))] += 1
    assert not kernel.conserves(counts, each, most + 1)


@each_kernel
def test_large_counts_do_not_overflow(kernel):
    counts = np.full((2, 65536), (1 << 32) - 1, np.uint32)
    assert kernel.conserves(counts, 65536 * ((1 << 32) - 1), (1 << 32) - 1)
    assert kernel.conserves(np.full((1, 65536), 65535, np.uint16), 65536 * 65535, 65535)


@each_kernel
@given(st.binary(min_size=1, max_size=1000))
def test_base64_gives_the_bytes_back(kernel, data):
    text = base64.b64encode(data)
    assert kernel.from_base64(text, len(data)).tobytes() == data
    assert kernel.from_base64(text, len(data) + 3) is None


@each_kernel
@given(st.binary(min_size=1, max_size=400), st.integers(0, 255), st.data())
def test_a_character_too_many_or_of_another_alphabet_is_no_base64(kernel, data, wrong, draw):
    text = bytearray(base64.b64encode(data))
    at = draw.draw(st.integers(0, len(text) - 1))
    text[at] = wrong
    try:
        expected = base64.b64decode(bytes(text), validate=True)
    except ValueError:
        expected = b""
    found = kernel.from_base64(bytes(text), len(data))
    assert (b"" if found is None else found.tobytes()) == (expected if len(expected) == len(data) else b"")
    assert kernel.from_base64(bytes(text[:-1]), len(data)) is None


@given(SIZES, st.integers(1, 1 << 20), st.sampled_from(["u1", "u2", "u4"]))
def test_usage_has_the_same_bits_everywhere(n, covered, dtype):
    counts = np.random.default_rng(n).integers(0, min(covered, np.iinfo(dtype).max) + 1, n).astype(dtype)
    expected = np.minimum(counts.astype(np.float32) / np.float32(covered), np.float32(0.999))
    for kernel in ALL:
        np.testing.assert_array_equal(kernel.usage(counts.reshape(1, n), covered, 0.999), expected)


@each_kernel
@given(SIZES, st.integers(0, 1000))
def test_a_row_is_the_logarithm_of_what_is_idle_in_whole_units(kernel, n, seed):
    usage = usages(n, seed)
    row = kernel.row(usage)
    assert row.dtype == np.int32
    assert not row[usage == 0].any()
    # float32 holds 1 - usage to 2^-25, and numbers of this size to 2^-24: less than two units where it is likely at all
    exact = np.log1p(-usage.astype(float)) * 2**20
    assert (abs(row - exact) <= np.maximum(1, abs(exact) * 2e-7) + 0.5).all()


@each_kernel
def test_no_row_is_below_the_least_that_gateways_take_from_each_other(kernel):
    assert LEAST_IN_ROW < int(kernel.row(np.array([MOST], np.float32))[0]) < LEAST_IN_ROW + 8


@each_kernel
@given(SIZES, st.integers(0, 1000))
def test_batches_are_what_their_formulas_say(kernel, n, seed):
    batches, rng = kernel.batches(3, n), np.random.default_rng(seed)
    present, came = [usages(n, seed + i) for i in range(4)], []
    for number, usage in enumerate(present, start=1):
        row, idle = batches.join(1, usage, number)
        assert (row == kernel.row(usage)).all()
        came.append(usage.astype(float))
    exact = np.prod([1 - usage for usage in came], axis=0)
    assert idle == pytest.approx(exact.sum(), abs=1e-4 * n**0.5)
    share, asked = 0.5 + rng.random(), usages(n, seed + 9)
    batches.compose(1, share, 2.0)
    alike = np.maximum((exact * (1 - np.mean(came, axis=0)) ** 2) ** share, np.exp(-60))
    assert batches.products(asked) == pytest.approx([asked.sum(), alike @ asked, asked.sum()], rel=1e-4, abs=1e-4)
    for usage in present:
        idle = batches.grow(1, kernel.row(usage), -1)
    assert idle == n  # to the last bit
    assert not batches.sums.any()
    others = np.full(n, -(2**40), np.int64)
    assert batches.grow(2, others) == pytest.approx(n * np.exp(-60), rel=1e-5)
    assert batches.grow(2, others, -1) == n


@each_kernel
@given(SIZES)
def test_equal_batches_have_equal_products_wherever_they_stand(kernel, n):
    batches = kernel.batches(9, n)
    for batch in range(9):
        batches.grow(batch, kernel.row(usages(n, 1)))
        batches.compose(batch, 1.0, 2.0)
    assert len(set(batches.products(usages(n, 2)).tolist())) == 1


@given(SIZES, st.integers(0, 1000))
def test_compiled_code_differs_from_numpy_by_rounding_alone_and_all_of_it_is_alike(n, seed):
    rows = [kernel.row(usages(n, seed)) for kernel in ALL]
    plain, *others = results = [], *([] for _ in COMPILED)
    for kernel, found in zip([NumpyKernel(), *COMPILED], results, strict=True):
        batches = kernel.batches(2, n)
        found += [batches.join(1, usages(n, seed + i), i)[1] for i in (1, 2)]
        found.append(batches.grow(1, rows[-1]))
        batches.compose(1, 0.7, 2.0)
        found += batches.products(usages(n, seed + 3)).tolist()
    assert all((rows[0] == row).all() for row in rows[:-1])
    assert all(abs(rows[-1] - row).max() <= 2 for row in rows[:-1])
    assert all(other == others[0] for other in others)
    assert all(other == pytest.approx(plain, rel=2e-6, abs=1e-6) for other in others)


@each_kernel
def test_a_mean_is_of_all_that_were_blended_in(kernel):
    mean, came = np.zeros(20, np.float32), [usages(20, i) for i in range(5)]
    for number, usage in enumerate(came, start=1):
        kernel.blend(mean, usage, number)
    np.testing.assert_allclose(mean, np.mean(came, axis=0), rtol=1e-5)


@each_kernel
@given(WIDTHS, DTYPES, st.booleans(), st.integers(0, 99))
def test_similarity_is_the_product_with_the_weighed_counts_of_the_kept_layers(kernel, experts, dtype, weighed, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 200, (5, experts)).astype(dtype)
    layers = np.flatnonzero(rng.random(5) < 0.6).astype(np.int64)
    weights = rng.random((len(layers), experts)).astype(np.float32) if weighed else None
    vectors = rng.random((3, len(layers) * experts)).astype(np.float32)
    if not len(layers):
        return
    features = (counts[layers] * (1.0 if weights is None else weights.astype(float))).ravel()
    similarity = kernel.similarity(layers, weights)
    for given_vectors in (vectors, np.asfortranarray(vectors), vectors.copy()):
        products, length = similarity(counts, given_vectors)
        np.testing.assert_allclose(products, vectors.astype(float) @ features, rtol=1e-5)
        assert length == pytest.approx(np.linalg.norm(features), rel=1e-5)


@each_kernel
def test_a_copy_computes_the_same_and_goes_its_own_way(kernel):
    """Simulations give each further gateway a copy of a policy."""
    batches, use = kernel.batches(2, 17), usages(17, 1)
    batches.join(0, use, 1)
    batches.compose(0, 1.0, 2.0)
    twin, before = copy.deepcopy(batches), batches.products(use)
    batches.join(0, usages(17, 2), 2)
    batches.compose(0, 1.0, 2.0)
    assert np.array_equal(twin.products(use), before)
    assert not np.array_equal(batches.products(use), before)
    assert not np.array_equal(twin.sums, batches.sums)
    similar = kernel.similarity(np.array([0, 2]), None)
    counts, vectors = np.arange(9, dtype="u2").reshape(3, 3), np.ones((2, 6), np.float32)
    (products, norm), (expected, other) = copy.deepcopy(similar)(counts, vectors), similar(counts, vectors)
    assert (products.tolist(), norm) == (expected.tolist(), other)
