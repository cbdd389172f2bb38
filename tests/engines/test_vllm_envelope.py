"""Counts are taken out of a reply before it is parsed, and what is read is what a JSON parser would have read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie import wire
from coterie.core import ExpertCounts, ModelGeometry
from coterie.engines.vllm_nixl import VllmNixl
from coterie.errors import EngineError, WireError

GEOMETRY = ModelGeometry(2, 4, 2)
COUNTS = ExpertCounts(GEOMETRY, np.array([[3, 2, 1, 0], [0, 1, 2, 3]], np.uint8), tokens=3, covered=3)
ENVELOPE = wire.encode_counts(COUNTS)
engine = VllmNixl()

values = st.recursive(
    st.none()
    | st.integers()
    | st.text()
    | st.sampled_from(["counts", '"counts": "', '"coterie":', "\\", ENVELOPE["counts"]]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["counts", "coterie", "coterie_output", "a", 'x"counts":"']), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def reply(params, *, compact=False, **more):
    body = {**more, "kv_transfer_params": params, "usage": {"prompt_tokens": 3}}
    return json.dumps(body, separators=(",", ":") if compact else None).encode()


@given(
    st.dictionaries(st.sampled_from(["id", "counts", "coterie", "b"]), values, max_size=3),
    values,
    values,
    st.booleans(),
)
def test_counts_and_parameters_are_those_that_a_parser_would_have_found(more, before, behind, compact):
    params = {"counts": before, "coterie": ENVELOPE, "b": {"counts": behind}}
    handoff = engine.handoff(reply(params, compact=compact, **more))
    assert {name: json.loads(bytes(raw)) for name, raw in handoff.params.items()} == {
        "counts": before,
        "b": {"counts": behind},
    }
    assert engine.counts(handoff).counts.tolist() == COUNTS.counts.tolist()


@given(values, st.booleans())
def test_whatever_else_is_there_in_place_of_an_envelope_is_refused_and_what_stands_beside_it_is_read(envelope, compact):
    params = {"coterie": envelope, "remote": {"counts": "of something else"}, "counts": "AAAA"}
    handoff = engine.handoff(reply(params, compact=compact))
    assert json.loads(bytes(handoff.params["remote"])) == {"counts": "of something else"}
    assert json.loads(bytes(handoff.params["counts"])) == "AAAA"
    with pytest.raises(WireError):
        engine.counts(handoff)


def test_counts_in_any_place_of_the_envelope_and_with_escapes_are_read():
    others = {name: value for name, value in ENVELOPE.items() if name != "counts"}
    for envelope in ({"counts": ENVELOPE["counts"], **others}, ENVELOPE):
        body = reply({"coterie": envelope, "a": 1})
        for written in (body, body.replace(b"A", b"\\u0041")):
            assert engine.counts(engine.handoff(written)).counts.tolist() == COUNTS.counts.tolist()


@pytest.mark.parametrize("text", ["\x00", "!", "\u00e4", " "])
def test_counts_that_are_no_base64_are_refused_when_they_are_read(text):
    body = reply({"coterie": ENVELOPE, "a": 1}).replace(ENVELOPE["counts"].encode(), text.encode())
    with pytest.raises(WireError, match="counts envelope"):
        engine.counts(engine.handoff(body))


def test_a_reply_that_ends_within_its_counts_is_none():
    body = reply({"coterie": ENVELOPE})
    with pytest.raises(EngineError, match="cannot be read"):
        engine.handoff(body[: body.index(b'"counts"') + 14])
