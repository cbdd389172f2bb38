"""`BlockCounts` against a plain numpy count, for random steps, and its dtypes."""

import numpy as np
import torch

from coterie.core import ModelGeometry
from coterie.vllm_plugin.blocks import BlockCounts

GEOMETRY = ModelGeometry(layers=3, experts=10, top_k=4)
BLOCKS = 9

for block_size, dtype in ((128, torch.uint8), (255, torch.uint8), (256, torch.int16), (40000, torch.int32)):
    rng = np.random.default_rng(block_size)
    rows = BlockCounts(BLOCKS, block_size, GEOMETRY, "cpu")
    assert rows._rows.dtype is dtype
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
        rows.add(torch.tensor(slots, dtype=torch.int64), torch.from_numpy(garbage.reshape(-1, 3, 4)).to(torch.int32))
        some = rng.permutation(BLOCKS)[: rng.integers(1, BLOCKS)].tolist()
        tokens, total = rows.sum(some)
        np.testing.assert_array_equal(total, truth[some].sum(0))
        assert tokens == written[some].sum()

full = BlockCounts(1, 255, ModelGeometry(1, 2, 1), "cpu")
full.add(torch.arange(255), torch.zeros(255, 1, 1, dtype=torch.int32))
assert full.sum([0])[1].tolist() == [[255, 0]], "a full block overflowed"
print("rows agree")
