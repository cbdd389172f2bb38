"""What a server computes: equal to the layer that it is a part of, however requests are split and merged."""

from __future__ import annotations

import sys
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core import ModelGeometry
from coterie.errors import InputError, UnsupportedError
from coterie.experts.members import placed_experts
from coterie.experts.protocol import Dtype, Request, Status, from_float32, to_float32
from coterie.experts.server import ExpertServer, ModelingKernel, check_held, load_experts, parse_experts
from coterie.experts.server.batches import merge
from coterie.experts.server.holdings import HeldLayer
from coterie.experts.server.kernels import make_kernel
from coterie.modeling import prepare
from coterie.modeling.expert_tensors import ExpertFiles
from coterie.modeling.experts import ExpertWeights
from coterie.modeling.gates import Choice
from coterie.modeling.kernels import kernels
from coterie.modeling.prepare import open_weights
from coterie.placement import Placement
from tiny_checkpoints import write_checkpoint
from tiny_experts import write_gpt_oss

EXPERTS, TOP_K, HIDDEN = 8, 2, 64
GEOMETRY = ModelGeometry(2, EXPERTS, TOP_K)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="module")
def local(checkpoint):
    """The layers as the engine has them: its own packed file and kernel."""
    tensors, kernel = open_weights(prepare(checkpoint, checkpoint / "packed")).tensors, next(kernels())
    layers = [ExpertWeights(*(tensors.floats(f"{n}.experts.{part}") for part in ("gate_up", "down"))) for n in (0, 1)]
    return lambda request: kernel.routed(
        request.hidden, Choice(request.ids.astype(np.intp), request.weights), layers[request.layer]
    )


def serve(checkpoint, experts, since=0):
    files, kernel = ExpertFiles.open(checkpoint), ModelingKernel()
    held = parse_experts(experts, files.model.geometry)
    return ExpertServer(files.model, kernel, load_experts(files, held, kernel, since=since))


@pytest.fixture(scope="module")
def server(checkpoint):
    return serve(checkpoint, "all")


def random_request(seed, tokens, layer=0, epoch=0, dtype=Dtype.FLOAT32, experts=EXPERTS):
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.tile(np.arange(experts, dtype=np.int32), (tokens, 1)), axis=1)[:, :TOP_K].copy()
    hidden = from_float32(rng.standard_normal((tokens, HIDDEN), np.float32), dtype)
    return Request(layer, epoch, 1, hidden, ids, rng.random((tokens, TOP_K), np.float32), dtype)


def of(request, **changes):
    fields = {name: getattr(request, name) for name in Request.__struct_fields__}
    return Request(**fields | changes)


@given(seed=st.integers(0, 1000), tokens=st.integers(1, 300), layer=st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_one_server_s_sums_are_the_local_layer_s_bit_for_bit(seed, tokens, layer, server, local):
    request = random_request(seed, tokens, layer)
    (reply,) = server.compute([request])
    np.testing.assert_array_equal(reply.sums, local(request))


@given(seed=st.integers(0, 1000), tokens=st.integers(1, 300), split=st.sets(st.integers(0, 7), min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_two_servers_sums_add_up_to_the_local_layer_s(seed, tokens, split, pair, local):
    request = random_request(seed, tokens)
    total = np.zeros((tokens, HIDDEN), np.float32)
    for one, own in zip(pair, (np.isin(request.ids, [*split]), ~np.isin(request.ids, [*split])), strict=True):
        (reply,) = one.compute([of(request, ids=np.where(own, request.ids, np.int32(-1)))])
        total += reply.sums
    expected = local(request)
    assert np.abs(total - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.fixture(scope="module")
def pair(checkpoint):
    return [serve(checkpoint, "all") for _ in range(2)]


@given(sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1)), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_merged_requests_get_what_each_would_get_alone(sizes, server):
    requests = [random_request(seed, tokens, layer) for seed, (tokens, layer) in enumerate(sizes)]
    for request, reply in zip(requests, server.compute(requests), strict=True):
        (alone,) = server.compute([request])
        np.testing.assert_array_equal(reply.sums, alone.sums)


def test_only_requests_of_one_layer_top_k_and_dtype_are_merged():
    plain = random_request(0, 3)
    narrow = of(plain, ids=plain.ids[:, :1], weights=plain.weights[:, :1])
    half = of(plain, hidden=plain.hidden.astype(np.float16), dtype=Dtype.FLOAT16)
    requests = [plain, random_request(1, 2, layer=1), narrow, random_request(2, 4), half]
    batches = merge(enumerate(requests))
    assert [(batch.members, batch.tokens) for batch in batches] == [
        ((0, 3), (3, 4)),
        ((1,), (2,)),
        ((2,), (3,)),
        ((4,), (3,)),
    ]


def test_a_batch_ends_before_it_has_too_many_tokens():
    requests = [
        random_request(n, tokens, layer) for n, (tokens, layer) in enumerate([(3, 0), (2, 1), (4, 0), (2, 0), (9, 0)])
    ]
    assert [batch.members for batch in merge(enumerate(requests), most=7)] == [(0, 2), (1,), (3,), (4,)]


def test_a_request_for_an_expert_elsewhere_is_refused_and_others_beside_it_are_computed(checkpoint):
    server = serve(checkpoint, "0-5", since=7)
    good, bad = random_request(1, 5, epoch=7, experts=6), random_request(1, 5, epoch=9, experts=6)
    bad = of(bad, ids=np.where(bad.ids == bad.ids[0, 0], np.int32(6), bad.ids))
    replies = server.compute([bad, good])
    assert [reply.status for reply in replies] == [Status.ABSENT, Status.COMPUTED]
    assert replies[0].sums.shape == (0, HIDDEN)
    assert [reply.epoch for reply in replies] == [7, 7]
    server.tally()
    assert server.usage.requests == {Status.COMPUTED: 1, Status.STALE: 0, Status.ABSENT: 1, Status.MALFORMED: 0}


@given(held=st.sets(st.integers(0, 4), min_size=1), ids=st.lists(st.integers(-1, 4), min_size=1, max_size=9))
def test_a_layer_lacks_what_is_asked_for_and_not_held(held, ids):
    places = np.full(6, -1, np.int64)  # of 5 experts, and of -1
    places[sorted(held)] = np.arange(len(held))
    layer = HeldLayer(tuple(sorted(held)), places, None)
    assert layer.lacks(np.array([ids], np.int32)) == (not {expert for expert in ids if expert >= 0} <= held)


def test_a_layer_of_which_a_server_has_nothing_is_absent(checkpoint):
    server = serve(checkpoint, "1:0-7")
    assert [reply.status for reply in server.compute([random_request(0, 2), random_request(0, 2, layer=1)])] == [
        Status.ABSENT,
        Status.COMPUTED,
    ]


@pytest.fixture(scope="module")
def partial_servers(checkpoint):
    """Servers by what they have."""
    return {experts: serve(checkpoint, experts) for experts in ("0", "1-7", "0-3,7", "2,5")}


@given(data=st.data(), tokens=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_a_request_is_absent_just_where_it_names_an_expert_that_the_server_lacks(data, tokens, partial_servers):
    experts, server = data.draw(st.sampled_from(sorted(partial_servers.items())))
    ids = data.draw(st.lists(st.lists(st.integers(-1, 7), min_size=2, max_size=2), min_size=tokens, max_size=tokens))
    own = {-1, *parse_experts(experts, GEOMETRY)[0]}
    request = of(random_request(0, tokens), ids=np.array(ids, np.int32).reshape(tokens, 2))
    (reply,) = server.compute([request])
    assert reply.status is (Status.COMPUTED if own.issuperset(chain(*ids)) else Status.ABSENT)


def test_the_epoch_since_when_a_server_has_its_experts_never_goes_back(checkpoint):
    server = serve(checkpoint, "0-3", since=4)
    seen = []
    for since in (3, 6, 5, 6):
        server.date(since)
        seen.append(server.holding.since)
    assert seen == [4, 6, 6, 6]
    assert server.holding.held == ((0, 1, 2, 3),) * 2


def test_replaced_experts_serve_clients_that_know_the_new_epoch(checkpoint):
    server, other = serve(checkpoint, "0-3", since=1), serve(checkpoint, "4-7", since=5)
    old, new = random_request(0, 2, epoch=4, experts=4), random_request(0, 2, epoch=5, experts=4)
    new = of(new, ids=new.ids + np.int32(4))
    assert server.compute([old])[0].status is Status.COMPUTED
    server.replace(other.holding)
    replies = server.compute([old, new])
    assert [(reply.status, reply.epoch) for reply in replies] == [(Status.STALE, 5), (Status.COMPUTED, 5)]
    with pytest.raises(InputError, match="since epoch 5; must be after 5"):
        server.replace(other.holding)


def test_load_is_counted_by_expert_and_layer(checkpoint):
    server = serve(checkpoint, "all")
    one = random_request(0, 3, layer=1)
    ids = np.array([[0, 1], [1, -1], [-1, -1]], np.int32)
    server.compute([of(one, ids=ids), of(one, ids=ids)])
    assert server.usage.batches == 0  # replies do not wait for counts
    for _ in range(2):  # what was counted is not counted again
        server.tally()
    assert server.usage.load.tolist() == [[0] * 8, [2, 4, 0, 0, 0, 0, 0, 0]]
    usage = server.usage
    assert (usage.batches, usage.merged, usage.tokens, usage.active) == (1, 2, 6, 2)
    assert server.usage.sizes[3] == 1  # 6 tokens: 4 to 7


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.BFLOAT16])
def test_short_floats_are_computed_as_float32_and_rounded_once(dtype, server, local):
    request = random_request(0, 9, dtype=dtype)
    (reply,) = server.compute([request])
    exact = local(of(request, hidden=to_float32(request.hidden, dtype), dtype=Dtype.FLOAT32))
    assert (reply.dtype, reply.sums.dtype) == (dtype, dtype.numpy)
    np.testing.assert_array_equal(reply.sums, from_float32(exact, dtype))


def test_every_brain_float_is_itself_and_what_lies_between_two_goes_to_the_nearer_or_the_even_one():
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = to_float32(bits, Dtype.BFLOAT16)
    np.testing.assert_array_equal(from_float32(values, Dtype.BFLOAT16)[~np.isnan(values)], bits[~np.isnan(values)])
    assert np.isnan(to_float32(from_float32(values, Dtype.BFLOAT16), Dtype.BFLOAT16)[np.isnan(values)]).all()
    low = np.array([0x3F80, 0x3F81, 0x3F80, 0x3F81], np.uint32) << 16
    above = low + np.array([0x7FFF, 0x7FFF, 0x8000, 0x8000], np.uint32)
    assert from_float32(above.view(np.float32), Dtype.BFLOAT16).tolist() == [0x3F80, 0x3F81, 0x3F80, 0x3F82]


def test_experts_with_biases_and_bounds_are_served_from_four_bits(tmp_path):
    # Each token has one expert of weight 1, so that its sum is the expert's formula.
    server = serve(write_gpt_oss(tmp_path, mxfp4=True), "1-3")
    rng = np.random.default_rng(0)
    ids = np.array([[1, -1], [-1, 3], [2, -1]], np.int32)
    request = Request(1, 0, 1, rng.standard_normal((3, HIDDEN), np.float32), ids, np.ones((3, 2), np.float32))
    (reply,) = server.compute([request])
    for row, own, got in zip(request.hidden.astype(float), ids.max(axis=1), reply.sums, strict=True):
        expert = ExpertFiles.open(tmp_path).expert(1, own)
        gate = np.minimum(expert.gate @ row + expert.biases[0], 2)
        up = np.clip(expert.up @ row + expert.biases[1], -2, 2)
        expected = expert.down @ (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)) + expert.biases[2]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="vLLM for CPUs is not in this environment"):
        make_kernel("vllm")
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("torch", "triton"):
        monkeypatch.delitem(sys.modules, f"coterie.experts.{name}", raising=False)
        with pytest.raises(UnsupportedError, match=rf"kernel {name}: .*install torch"):
            make_kernel(name)


# --- which experts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("all", ((0, 1, 2, 3, 4, 5, 6, 7),) * 2),
        ("0-2,5", ((0, 1, 2, 5),) * 2),
        ("5, 0-2", ((0, 1, 2, 5),) * 2),
        ("1:3-4", ((), (3, 4))),
        ("0:0-1;1:7", ((0, 1), (7,))),
    ],
)
def test_experts_are_named_by_ranges_for_all_layers_or_for_each(text, held):
    assert parse_experts(text, GEOMETRY) == held


@pytest.mark.parametrize(
    "text", ["", "8", "0-8", "3-1", "a", "0,0", "0-", "-1", "2:0", "0:1;0:2", "x:1", "0:", "0-99999999", "1:0-3;"]
)
def test_experts_that_cannot_be_are_refused(text):
    with pytest.raises(InputError, match="experts"):
        parse_experts(text, GEOMETRY)


def test_experts_of_another_number_of_layers_are_refused():
    with pytest.raises(InputError, match="experts of 1 layers, 1 in all; the model has 2 layers x 8 experts"):
        check_held(((0,),), GEOMETRY)


def test_a_rank_has_what_its_placement_says():
    experts, ranks = np.array([[1, 0, 2, 1], [2, 1, 0, 2]]), np.array([0, 0, 1, 1])
    placement = Placement(experts, ranks, np.array([[0.5, 1, 1, 0.5], [0.5, 1, 1, 0.5]]))
    assert placed_experts(placement, 0) == ((0, 1), (1, 2))
    assert placed_experts(placement, 1) == ((1, 2), (0, 2))
    with pytest.raises(InputError, match="rank 2 of 2"):
        placed_experts(placement, 2)
