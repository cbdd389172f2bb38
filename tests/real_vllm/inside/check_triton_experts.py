"""The Triton products in Triton's interpreter, against float64 sums by hand.  Prints how many cases were compared."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from coterie.core import ModelGeometry
from coterie.errors import UnsupportedError
from coterie.experts.server.kernels import ModelingKernel
from coterie.experts.triton.grouped import group
from coterie.experts.triton.kernel import TritonKernel
from coterie.modeling.expert_tensors import Expert, ExpertModel

BOUNDS = (1.702, 1.5)  # a limit that bites


def model(experts, hidden, size, bounds):
    return ExpertModel(
        "gpt_oss" if bounds else "qwen3_moe", ModelGeometry(1, experts, 1), (0,), hidden, size, bounds, False
    )


def random_experts(rng, kind):
    def matrix(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    for _ in range(kind.geometry.experts):
        biases = (matrix(kind.size), matrix(kind.size), matrix(kind.hidden)) if kind.bounds else None
        yield Expert(
            matrix(kind.size, kind.hidden), matrix(kind.size, kind.hidden), matrix(kind.hidden, kind.size), biases
        )


def by_hand(kind, experts, rows, ids, router):
    total = np.zeros(rows.shape)
    for t, chosen in enumerate(ids):
        for place, e in enumerate(chosen):
            if e < 0:
                continue
            one, x = experts[e], rows[t].astype(np.float64)
            gate, up = one.gate @ x, one.up @ x
            if kind.bounds:
                slope, limit = kind.bounds
                gate, up = gate + one.biases[0], up + one.biases[1]
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
            else:
                slope = 1.0
            out = one.down @ (gate / (1 + np.exp(-slope * gate)) * up)
            total[t] += router[t, place] * (out + one.biases[2] if kind.bounds else out)
    return total


def choices(rng, tokens, experts, top_k):
    """Even, skewed, sparse, one expert, and none of this server's."""
    even = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)]).reshape(tokens, top_k)
    skewed = np.minimum(even, 2)
    yield from (even, skewed, np.where(rng.random(even.shape) < 0.6, -1, even), np.full_like(even, experts - 1))
    yield np.full_like(even, -1)


def check_groups(ids, experts):
    """The tables against a loop over experts."""
    found = group(torch.from_numpy(ids.astype(np.int32)), experts)
    flat, rows, tiles, expected = ids.ravel(), 0, 0, []
    for e in range(experts):
        if count := int((flat == e).sum()):
            expected.append((e, count, rows, tiles))
            assert found.order[rows : rows + count].tolist() == np.flatnonzero(flat == e).tolist()
            rows, tiles = rows + count, tiles + -(-count // 16)
    assert found.number.tolist() == [len(expected), tiles], (found.number, expected)
    tables = torch.stack((found.expert, found.pairs, found.row, found.tile))[:, : len(expected)]
    assert tables.T.tolist() == [list(entry) for entry in expected]


def main():
    rng, cases = np.random.default_rng(0), 0
    try:
        TritonKernel("cpu", torch.bfloat16).check(model(2, 16, 16, None))
        raise AssertionError("bfloat16 was not refused, which the interpreter multiplies as integers")
    except UnsupportedError:
        pass
    for experts, hidden, size, top_k, bounds in (
        (5, 48, 40, 2, None), (8, 64, 64, 3, BOUNDS), (3, 200, 72, 2, None), (16, 32, 96, 4, BOUNDS),
        (1, 16, 16, 1, None),
    ):  # fmt: skip
        kind = model(experts, hidden, size, bounds)
        held = list(random_experts(rng, kind))
        exact, half, ours = TritonKernel("cpu", torch.float32), TritonKernel("cpu", torch.float16), ModelingKernel()
        exact.check(kind)
        packed = [kernel.pack(kind, experts, held) for kernel in (exact, half, ours)]
        for tokens in (1, 7, 40):
            rows = rng.standard_normal((tokens, hidden)).astype(np.float32)
            for ids in choices(rng, tokens, experts, top_k):
                router = rng.random(ids.shape).astype(np.float32)
                check_groups(ids, experts)
                want = by_hand(kind, held, rows, ids, router)
                scale = np.abs(want).max() or 1.0
                found = exact.compute(packed[0], rows, ids, router)
                assert found.dtype == np.float32
                assert np.abs(found - want).max() <= 2e-6 * scale * np.sqrt(hidden), (tokens, ids)
                assert np.abs(half.compute(packed[1], rows, ids, router) - want).max() <= 0.01 * scale
                assert np.abs(found - ours.compute(packed[2], rows, ids, router)).max() <= 1e-5 * scale
                if tokens > 1:  # a row's bits do not depend on its batch
                    alone = exact.compute(packed[0], rows[3:4], ids[3:4], router[3:4])
                    assert np.array_equal(found[3:4], alone)
                cases += 1
    print(cases)


main()
