"""Steps of requests, and what each of them is on its own."""

from __future__ import annotations

import numpy as np

from coterie.modeling import StepBatch

BLOCK = 16


class Cache:
    """A paged cache whose unused memory is no number, and who has which blocks."""

    def __init__(self, model, rng, blocks=64, block_size=BLOCK):
        self.kv = np.full(model.kv_shape(blocks, block_size), np.nan, np.float32)
        self.free = rng.permutation(blocks).tolist()

    def blocks(self, tokens):
        return [self.free.pop() for _ in range(-(-tokens // self.kv.shape[2]))]

    def slots(self, table, start, stop):
        """Keys and values of some positions: `[tokens, layers, width]`."""
        positions = np.arange(start, stop)
        size = self.kv.shape[2]
        return self.kv[np.asarray(table)[positions // size], :, positions % size]


def batch_of(pieces):
    """A step from (all tokens, start, stop, block table) of each request, with all logits."""
    starts = np.cumsum([0, *(stop - start for _, start, stop, _ in pieces)])
    return StepBatch(
        np.concatenate([tokens[start:stop] for tokens, start, stop, _ in pieces]),
        np.concatenate([np.arange(start, stop) for _, start, stop, _ in pieces]),
        [(int(at), stop - start) for at, (_, start, stop, _) in zip(starts, pieces, strict=False)],
        [table for *_, table in pieces],
        np.arange(starts[-1]),
    )


def alone(model, tokens, block_size=BLOCK):
    """One request in one step: its output, and all keys and values `[T, layers, width]`."""
    cache = Cache(model, np.random.default_rng(9), block_size=block_size)
    table = cache.blocks(len(tokens))
    output = model.forward(batch_of([(tokens, 0, len(tokens), table)]), cache.kv)
    return output, cache.slots(table, 0, len(tokens))


def random_tokens(model, rng, count):
    return rng.integers(0, model.vocab, count)


def assert_same(output, expected, rows, span):
    np.testing.assert_array_equal(output.logits[rows], expected.logits[span])
    np.testing.assert_array_equal(output.expert_ids[rows], expected.expert_ids[span])


class Alone:
    """Requests computed one by one, and a cache in which steps may go on with any of them from anywhere."""

    def __init__(self, model, rng, lengths):
        self.texts = [random_tokens(model, rng, length) for length in lengths]
        outputs, kept = zip(*(alone(model, tokens) for tokens in self.texts), strict=True)
        self.logits = np.concatenate([output.logits for output in outputs])
        self.expert_ids = np.concatenate([output.expert_ids for output in outputs])
        self.kept = np.concatenate(kept)
        self.first = np.cumsum([0, *lengths])
        self.cache = Cache(model, rng, blocks=sum(-(-length // BLOCK) for length in lengths))
        self.tables = [self.cache.blocks(length) for length in lengths]

    def slots(self, request, start, stop):
        positions = np.arange(start, stop)
        return np.asarray(self.tables[request])[positions // BLOCK], slice(None), positions % BLOCK

    def step(self, spans):
        """A step of (request, start, stop), whose earlier tokens are cached and nothing else; and rows computed."""
        self.cache.kv[:] = np.nan
        for request, start, _ in spans:
            at = self.first[request]
            self.cache.kv[self.slots(request, 0, start)] = self.kept[at : at + start]
        rows = np.concatenate([self.first[request] + np.arange(start, stop) for request, start, stop in spans])
        return batch_of([(self.texts[one], start, stop, self.tables[one]) for one, start, stop in spans]), rows
