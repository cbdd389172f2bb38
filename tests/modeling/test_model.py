"""The forward pass: equal to transformers', and bit for bit alike in every batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from steps import Alone, Cache, alone, assert_same, batch_of, random_tokens

from coterie.core import ModelGeometry
from coterie.errors import InputError
from coterie.modeling import Model, StepBatch, attention, prepare
from coterie.modeling.numpy_kernel import NumpyKernel
from tiny_checkpoints import ARCHITECTURES, write_checkpoint
from traces import COTERIE_TINY, FIXTURES

# --- bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_row_has_the_same_bits_in_250_random_steps_of_up_to_32_requests(models, architecture):
    model, rng = models[architecture], np.random.default_rng(0)
    lengths = rng.integers(1, 40, 32).tolist()
    lengths[:2] = 70, 130
    expected = Alone(model, rng, lengths)
    for _ in range(250):
        spans = []
        for request in rng.permutation(32)[: rng.integers(1, 33)]:
            start = int(rng.integers(0, lengths[request]))
            spans.append((request, start, min(lengths[request], start + int(rng.choice([1, 1, 1, 1, 1, 2, 12])))))
        batch, rows = expected.step(spans)
        output = model.forward(batch, expected.cache.kv)
        np.testing.assert_array_equal(output.logits, expected.logits[rows])
        np.testing.assert_array_equal(output.expert_ids, expected.expert_ids[rows])
        written = [expected.cache.kv[expected.slots(*span)] for span in spans]
        np.testing.assert_array_equal(np.concatenate(written), expected.kept[rows])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_in_chunks_gives_the_bits_of_the_whole(models, architecture, chunk):
    model, rng = models[architecture], np.random.default_rng(1)
    tokens = random_tokens(model, rng, 90)
    whole, kept = alone(model, tokens)
    cache = Cache(model, rng)
    table = cache.blocks(len(tokens))
    for start in range(0, len(tokens), chunk):
        stop = min(start + chunk, len(tokens))
        output = model.forward(batch_of([(tokens, start, stop, table)]), cache.kv)
        assert_same(output, whole, slice(None), slice(start, stop))
    np.testing.assert_array_equal(cache.slots(table, 0, len(tokens)), kept)


def test_machines_that_need_full_tiles_of_queries_get_the_same_bits(packed, monkeypatch):
    model = Model.open(packed["mixtral"], NumpyKernel())
    tokens = random_tokens(model, np.random.default_rng(6), 70)
    whole, _ = alone(model, tokens)
    monkeypatch.setattr(attention, "same_bits", lambda *_: False)
    cache = Cache(model, np.random.default_rng(7))
    table = cache.blocks(len(tokens))
    model.forward(batch_of([(tokens, 0, 69, table)]), cache.kv)
    output = model.forward(batch_of([(tokens, 69, 70, table)]), cache.kv)
    assert_same(output, whole, slice(None), slice(69, 70))


def test_a_cached_prefix_gives_the_bits_of_a_prompt_computed_anew(models):
    model, rng = models["qwen3_moe"], np.random.default_rng(2)
    first, second = random_tokens(model, rng, 60), random_tokens(model, rng, 50)
    second[:48] = first[:48]
    cache = Cache(model, rng)
    table = cache.blocks(60)
    model.forward(batch_of([(first, 0, 60, table)]), cache.kv)
    shared = [*table[:3], *cache.blocks(2)]  # three blocks of 16 tokens are the same
    output = model.forward(batch_of([(second, 48, 50, shared)]), cache.kv)
    assert_same(output, alone(model, second)[0], slice(None), slice(48, 50))


@pytest.mark.parametrize("block_size", [1, 8, 64, 128])
def test_the_block_size_changes_no_bit(models, block_size):
    model = models["mixtral"]
    tokens = random_tokens(model, np.random.default_rng(3), 60)
    expected, kept = alone(model, tokens)
    output, written = alone(model, tokens, block_size)
    assert_same(output, expected, slice(None), slice(None))
    np.testing.assert_array_equal(written, kept)


def test_padding_experts_changes_no_bit(models, kernel, tmp_path):
    checkpoint = write_checkpoint(tmp_path, "deepseek_v3")
    padded = Model.open(prepare(checkpoint, tmp_path / "padded", pad_intermediate=512), kernel)
    tokens = random_tokens(padded, np.random.default_rng(4), 70)
    assert_same(alone(padded, tokens)[0], alone(models["deepseek_v3"], tokens)[0], slice(None), slice(None))


# --- values -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coterie_tiny(tmp_path_factory, any_kernel):
    return Model.open(prepare(COTERIE_TINY, tmp_path_factory.mktemp("weights")), any_kernel)


def continue_greedily(model, tokens, count):
    """Output tokens, one step each, after the prompt in one step."""
    cache = Cache(model, np.random.default_rng(0))
    text = np.concatenate((tokens, np.zeros(count, tokens.dtype)))
    table, done = cache.blocks(len(text)), 0
    for known in range(len(tokens), len(text)):
        output = model.forward(batch_of([(text, done, known, table)]), cache.kv)
        text[known], done = output.logits[-1].argmax(), known
    return text[len(tokens) :]


@pytest.mark.parametrize("number", [0, 1])
def test_logits_experts_and_greedy_tokens_are_those_of_transformers(coterie_tiny, number):
    stored = np.load(FIXTURES / "coterie-tiny-forward.npz")
    prompt, gates = stored[f"prompt_{number}"], stored[f"gates_{number}"]
    output, _ = alone(coterie_tiny, prompt)
    expected = stored[f"logits_{number}"]
    np.testing.assert_allclose(output.logits[-len(expected) :], expected, atol=1e-4)
    chosen = np.take_along_axis(gates, output.expert_ids.astype(int), axis=-1).min(axis=-1)
    rest = gates.copy()
    np.put_along_axis(rest, output.expert_ids.astype(int), -np.inf, axis=-1)
    assert (chosen > rest.max(axis=-1) - 1e-3).all()  # the best, or at a tie
    assert continue_greedily(coterie_tiny, prompt, 32).tolist() == stored[f"outputs_{number}"].tolist()


@pytest.mark.parametrize("heads", [3, 12, 16])
def test_heads_that_share_keys_are_heads_with_copies_of_them(heads, kernel, tmp_path):
    sizes = {"num_attention_heads": heads, "head_dim": 8}
    shared = write_checkpoint(tmp_path / "shared", "mixtral", num_key_value_heads=1, **sizes)
    copied = write_checkpoint(tmp_path / "copied", "mixtral", num_key_value_heads=heads, **sizes)
    tensors = load_file(shared / "model.safetensors")
    for name in tensors:
        if "k_proj" in name or "v_proj" in name:
            tensors[name] = np.tile(tensors[name], (heads, 1))
    save_file(tensors, copied / "model.safetensors")
    one, many = (Model.open(prepare(folder, folder), kernel) for folder in (shared, copied))
    tokens = random_tokens(one, np.random.default_rng(8), 70)
    whole, _ = alone(one, tokens)
    np.testing.assert_allclose(whole.logits, alone(many, tokens)[0].logits, atol=1e-4)
    cache = Cache(one, np.random.default_rng(9))
    table = cache.blocks(70)
    for start, stop in ((0, 30), (30, 69), (69, 70)):
        output = one.forward(batch_of([(tokens, start, stop, table)]), cache.kv)
        assert_same(output, whole, slice(None), slice(start, stop))


def test_a_window_hides_what_lies_before_it(models, kernel, tmp_path):
    # two layers of window 20 carry nothing further than 2 x 19 positions
    model = Model.open(prepare(write_checkpoint(tmp_path, "mixtral", sliding_window=20), tmp_path / "packed"), kernel)
    tokens = random_tokens(model, np.random.default_rng(5), 100)
    other = tokens.copy()
    other[40] = (other[40] + 1) % model.vocab
    (one, _), (two, _) = alone(model, tokens), alone(model, other)
    assert_same(one, two, slice(79, None), slice(79, None))
    assert (one.logits[40:78] != two.logits[40:78]).any(axis=1).all()
    full, _ = alone(models["mixtral"], tokens)
    assert_same(one, full, slice(0, 20), slice(0, 20))  # nothing is hidden yet


# --- edges --------------------------------------------------------------------------------------------------


def test_a_model_says_what_it_is(models):
    model = models["deepseek_v3"]
    assert model.geometry == ModelGeometry(layers=1, experts=8, top_k=2)
    assert model.vocab == 50
    assert model.kv_shape(3, 16) == (3, 2, 16, 12 + 4)  # latent and rotary key
    assert models["olmoe"].kv_shape(3, 16) == (3, 2, 16, 2 * 4 * 16)  # keys and values of four heads


@pytest.mark.parametrize("block_size", [0, 3, 48, 96])
def test_block_sizes_that_do_not_fit_tiles_are_refused(models, block_size):
    with pytest.raises(InputError, match="must divide 64"):
        models["olmoe"].kv_shape(4, block_size)


GOOD = StepBatch(np.array([1, 2, 3]), np.array([0, 1, 5]), [(0, 2), (2, 1)], [[0], [1]], np.array([2]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.array([1, 2, 50])}, "token id is not from 0 to 49: 1, 50"),
        ({"token_ids": np.array([-1, 2, 3])}, "token id is not from 0"),
        ({"positions": np.array([0, 1, 512])}, "position is not from 0 to 511"),
        ({"positions": np.array([0, 2, 5])}, r"row 0 has 2 tokens at positions \[0, 2\]"),
        ({"positions": np.array([0, 1])}, "3 tokens, 2 positions"),
        ({"rows": [(0, 2)]}, "3 tokens, 3 positions"),
        ({"rows": [(0, 2), (1, 1)]}, "row 1"),
        ({"rows": [(0, 3), (3, 0)]}, "row 0"),
        ({"block_tables": [[0]]}, "2 requests, but 1 block tables"),
        ({"block_tables": [[0], []]}, "row 2 has 0 blocks"),
        ({"block_tables": [[0], [4]]}, "among 4"),
        ({"block_tables": [[0], [-1]]}, "among 4"),
        ({"logits_rows": np.array([3])}, "logits row is not from 0 to 2"),
        ({"token_ids": np.array([], int), "positions": np.array([], int)}, "no tokens"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(models, change, message):
    model = models["olmoe"]
    kv = np.zeros(model.kv_shape(4, 16), np.float32)
    model.forward(GOOD, kv)
    before = kv.copy()
    with pytest.raises(InputError, match=message):
        model.forward(replace(GOOD, **change), kv)
    np.testing.assert_array_equal(kv, before)


@pytest.mark.parametrize(
    "kv",
    [
        np.zeros((4, 2, 16, 127), np.float32),
        np.zeros((4, 2, 16, 128)),
        np.zeros((4, 2, 32, 128), np.float32)[:, :, ::2],
        np.zeros((4, 32), np.float32),
    ],
)
def test_a_cache_of_another_kind_is_refused(models, kv):
    with pytest.raises(InputError, match="not a contiguous float32 array of kv_shape"):
        models["olmoe"].forward(GOOD, kv)


def test_no_logits_need_be_asked_for(models):
    model = models["olmoe"]
    kv = np.zeros(model.kv_shape(4, 16), np.float32)
    assert model.forward(replace(GOOD, logits_rows=np.array([], int)), kv).logits.shape == (0, 50)
