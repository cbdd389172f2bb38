"""A step in two halves: the same bits, two calls under way, and a half that fails leaves nothing behind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from steps import Alone

from coterie.errors import EngineError
from coterie.modeling import Model, PartError
from coterie.modeling.layers import Begun, Moe
from coterie.modeling.turns import Part, take_turns
from tiny_checkpoints import ARCHITECTURES


@dataclass
class Elsewhere:
    """A model's routed experts as if others computed them: only when they are waited for.

    Attributes:
        under_way: begun, and neither finished nor cancelled.
        most: that were under way at once.
        calls: so far.
        fails: numbers of calls whose experts are not there.
    """

    model: Model
    under_way: int = 0
    most: int = 0
    calls: int = 0
    fails: tuple[int, ...] = ()

    def start(self, layer, rows, choice):
        own = [one.forward for one in self.model._layers if isinstance(one.forward, Moe)][layer]
        self.calls, self.under_way = self.calls + 1, self.under_way + 1
        self.most = max(self.most, self.under_way)
        return Call(self, own._here(rows, choice), self.calls in self.fails)


@dataclass
class Call:
    elsewhere: Elsewhere
    begun: Begun
    fails: bool

    def finish(self):
        self.elsewhere.under_way -= 1
        if self.fails:
            raise EngineError("nobody is there")
        return self.begun.finish()

    def cancel(self):
        self.elsewhere.under_way -= 1


@pytest.fixture(params=ARCHITECTURES)
def elsewhere(models, request):
    return Elsewhere(models[request.param])


def in_halves(elsewhere, packed, overlap=2):
    """The model of which others compute the experts, in two halves from so many tokens on."""
    file = next(file for file in packed.values() if Model.open(file).config == elsewhere.model.config)
    return Model.open(file, elsewhere.model.kernel, elsewhere, overlap=overlap)


def random_spans(rng, lengths):
    """Prompts, parts of them, and single tokens."""
    for request in rng.permutation(len(lengths))[: rng.integers(1, len(lengths) + 1)]:
        start = int(rng.integers(0, lengths[request]))
        yield int(request), start, min(lengths[request], start + int(rng.choice([1, 1, 1, 5, 60])))


def test_a_step_in_halves_has_the_bits_of_each_request_alone(elsewhere, packed):
    model, rng = in_halves(elsewhere, packed), np.random.default_rng(0)
    lengths = rng.integers(1, 100, 12).tolist()
    expected = Alone(elsewhere.model, rng, lengths)
    for _ in range(40):
        spans = list(random_spans(rng, lengths))
        batch, rows = expected.step(spans)
        elsewhere.most = 0
        output = model.forward(batch, expected.cache.kv)
        np.testing.assert_array_equal(output.logits, expected.logits[rows])
        np.testing.assert_array_equal(output.expert_ids, expected.expert_ids[rows])
        written = [expected.cache.kv[expected.slots(*span)] for span in spans]
        np.testing.assert_array_equal(np.concatenate(written), expected.kept[rows])
        assert elsewhere.most == min(2, len(rows))  # a single token has no halves
        assert elsewhere.under_way == 0


def test_logits_come_in_the_order_in_which_they_are_asked_for(models, packed):
    elsewhere = Elsewhere(models["olmoe"])
    expected = Alone(elsewhere.model, np.random.default_rng(1), [9, 5])
    batch, rows = expected.step([(0, 0, 9), (1, 0, 5)])
    batch.logits_rows[:] = batch.logits_rows[::-1].copy()
    output = in_halves(elsewhere, packed).forward(batch, expected.cache.kv)
    np.testing.assert_array_equal(output.logits, expected.logits[rows[::-1]])


@pytest.mark.parametrize(("overlap", "most"), [(14, 2), (15, 1), (None, 1)])
def test_a_step_of_fewer_tokens_is_not_divided(models, packed, overlap, most):
    elsewhere = Elsewhere(models["qwen3_moe"])
    expected = Alone(elsewhere.model, np.random.default_rng(2), [9, 5])
    batch, _ = expected.step([(0, 0, 9), (1, 0, 5)])
    in_halves(elsewhere, packed, overlap).forward(batch, expected.cache.kv)
    assert elsewhere.most == most


def test_shared_experts_are_computed_while_others_compute_the_routed_ones(models, packed, kernel, monkeypatch):
    elsewhere, seen, dense = Elsewhere(models["deepseek_v3"]), [], type(kernel).dense

    def watched(self, *arguments):
        seen.append(elsewhere.under_way)
        return dense(self, *arguments)

    monkeypatch.setattr(type(kernel), "dense", watched)
    expected = Alone(elsewhere.model, np.random.default_rng(4), [9])
    batch, _ = expected.step([(0, 0, 9)])
    seen.clear()
    in_halves(elsewhere, packed, None).forward(batch, expected.cache.kv)
    assert seen == [0, 1]  # the first layer is a dense one, the second has shared experts


FIRST, SECOND = slice(0, 7), slice(7, 14)


@pytest.mark.parametrize(
    ("calls", "tokens"),
    [((1,), (FIRST,)), ((2,), (SECOND,)), ((3,), (FIRST,)), ((4,), (SECOND,)), ((1, 2), (FIRST, SECOND))],
)
def test_halves_whose_experts_are_not_there_are_named_and_the_others_given_up(models, packed, calls, tokens):
    elsewhere = Elsewhere(models["qwen3_moe"], fails=calls)  # two layers, so four calls
    model = in_halves(elsewhere, packed)
    expected = Alone(elsewhere.model, np.random.default_rng(3), [9, 5])
    batch, rows = expected.step([(0, 0, 9), (1, 0, 5)])
    with pytest.raises(PartError, match="nobody is there") as caught:
        model.forward(batch, expected.cache.kv)
    assert caught.value.tokens == tokens
    assert elsewhere.under_way == 0
    output = model.forward(batch, expected.cache.kv)  # it can be computed again
    np.testing.assert_array_equal(output.logits, expected.logits[rows])


# --- turns --------------------------------------------------------------------------------------------------


def part(name, said, waits=2, error=None):
    """A part that says what it does."""

    def steps():
        try:
            for number in range(waits):
                said.append(f"{name}{number}")
                yield
        except GeneratorExit:
            said.append(f"{name} given up")
            raise
        if error:
            raise error
        said.append(f"{name} done")
        return name

    return Part(slice(0, len(name)), steps())


def test_parts_take_turns_in_their_order():
    said = []
    assert take_turns([part(name, said) for name in "ab"]) == ["a", "b"]
    assert said == ["a0", "b0", "a1", "b1", "a done", "b done"]


def test_what_goes_wrong_in_one_part_ends_the_others():
    for error, raised, others in (
        (EngineError("gone"), PartError, ["c1", "c given up"]),  # whose experts may be gone, too
        (ValueError("a mistake"), ValueError, ["c given up"]),
    ):
        said = []
        with pytest.raises(raised, match=str(error)):
            take_turns([part("a", said, 1), part("b", said, 1, error), part("c", said, 2)])
        assert said == ["a0", "b0", "c0", "a done", *others]
