"""Both kinds of rows against a plain numpy count, for random steps, and its dtypes."""

import numpy as np
import torch

from coterie.blockrows import HostRows
from coterie.core import ModelGeometry
from coterie.vllm_plugin.blocks import DeviceRows

GEOMETRY = ModelGeometry(layers=3, experts=10, top_k=4)
BLOCKS = 9


def on_device(blocks, block_size, geometry):
    return DeviceRows(blocks, block_size, geometry, "cpu")


for make, block_size, itemsize in (
    (on_device, 128, 1), (on_device, 255, 1), (on_device, 256, 2), (on_device, 40000, 4),
    (HostRows, 128, 1), (HostRows, 255, 1), (HostRows, 256, 2), (HostRows, 70000, 4),
):  # fmt: skip
    rng = np.random.default_rng(block_size)
    rows = make(BLOCKS, block_size, GEOMETRY)
    assert rows.nbytes == (BLOCKS + 1) * 30 * itemsize
    truth = np.zeros((BLOCKS, 3, 10), int)
    written = np.zeros(BLOCKS, int)
    for _ in range(40):
        restart = rng.permutation(BLOCKS)[: rng.integers(0, 4)].tolist()
        if restart:
            rows.restart(restart)
            truth[restart] = written[restart] = 0
        slots, tokens = [], rng.integers(0, 12)
        for _ in range(tokens):
            block = int(rng.integers(0, BLOCKS))
            if written[block] < block_size:
                slots.append(block * block_size + written[block])
                written[block] += 1
        slots += [-1] * int(rng.integers(0, 4))  # padding, whose ids are garbage
        ids = rng.random((len(slots), 3, 10)).argsort(-1)[..., :4]
        for slot, token in zip(slots, ids, strict=True):
            for layer in range(3):
                if slot >= 0:
                    truth[slot // block_size, layer, token[layer]] += 1
        garbage = np.where(np.array(slots, int).reshape(-1, 1, 1) < 0, 10**6, ids)
        garbage = garbage.reshape(-1, 3, 4).astype(np.int32)
        rows.add(torch.tensor(slots, dtype=torch.int64), garbage if make is HostRows else torch.from_numpy(garbage))
        real = [slot for slot in slots if slot >= 0]
        some = rng.permutation(len(real))[: rng.integers(0, len(real) + 1)]
        if len(some):
            wanted = [real[i] for i in some]
            given = garbage if make is HostRows else torch.from_numpy(garbage)
            found = rows.ids_at(torch.tensor(slots), given, wanted)
            np.testing.assert_array_equal(found, ids[some])
            assert rows.ids_at(torch.tensor(slots), given, [*wanted, BLOCKS * block_size]) is None
        some = rng.permutation(BLOCKS)[: rng.integers(1, BLOCKS)].tolist()
        tokens, total = rows.sum(some)
        np.testing.assert_array_equal(total, truth[some].sum(0))
        assert tokens == written[some].sum()

for make in (on_device, HostRows):
    full = make(1, 255, ModelGeometry(1, 2, 1))
    ids = np.zeros((255, 1, 1), np.int32)
    full.add(torch.arange(255), ids if make is HostRows else torch.from_numpy(ids))
    assert full.sum([0])[1].tolist() == [[255, 0]], "a full block overflowed"
print("rows agree")
