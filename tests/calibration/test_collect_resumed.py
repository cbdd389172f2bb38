"""A collection that was cut short: what is kept, and what goes on from it."""

import asyncio
import errno
import json
from dataclasses import replace

import numpy as np
import pytest
from collecting import GEOMETRY, LINES, Silent, counts_of

from coterie.activations import ActivationTrace, TraceRecord
from coterie.calibration.collect import CollectOptions, run_collect
from coterie.calibration.journal import Header, Journal
from coterie.calibration.prompts import read_prompts
from coterie.core import ExpertCounts
from coterie.errors import EngineError, TraceError
from coterie.wire import count_ids
from traces import random_ids


def crash_after(collection, requests):
    """Run until `requests` are kept, then fail; returns the partial file's bytes."""
    collection.engine.bodies.clear()
    collection.engine.script = {requests + 1: lambda _: (500, {"error": {"message": "out of memory"}})}
    with pytest.raises(EngineError, match="answered 500: out of memory"):
        collection.run(concurrency=1)
    collection.engine.script = {}
    collection.engine.bodies.clear()
    return collection.partial.read_bytes()


@pytest.mark.parametrize("done", range(len(LINES)))
def test_a_crash_after_any_request_costs_only_the_rest(collection, done):
    crash_after(collection, done)
    trace = collection.run()
    assert len(collection.engine.bodies) == len(LINES) - done
    assert collection.report.begun == (4, done)
    assert trace.prefill_tokens.tolist() == [8, 16, 9, 8]


def test_a_last_line_cut_anywhere_is_dropped_and_said(collection):
    whole = crash_after(collection, 3)
    last = whole.rstrip().rindex(b"\n") + 1
    for cut in range(last + 1, len(whole), 97):
        collection.partial.write_bytes(whole[:cut])
        collection.engine.bodies.clear()
        collection.run(force=True)
        assert len(collection.engine.bodies) == 2
        assert "cut short" in collection.report.notices[0]


def test_a_line_that_is_no_cut_header_is_left_alone(collection):
    collection.partial.write_text("my shopping list")
    with pytest.raises(TraceError, match="was begun with another format"):
        collection.run()
    assert collection.partial.read_text() == "my shopping list"


def test_a_cut_header_begins_again(collection):
    collection.partial.write_bytes(b'{"model":"ti')
    assert len(collection.run()) == 4


def test_damage_before_the_last_line_is_an_error_naming_it(collection):
    lines = crash_after(collection, 3).split(b"\n")
    lines[2] = lines[2][:40]
    collection.partial.write_bytes(b"\n".join(lines))
    with pytest.raises(TraceError, match=r"out.trace.partial:3 is damaged .* delete the file"):
        collection.run()
    assert not collection.engine.bodies


@pytest.mark.parametrize("changes", [{"max_tokens": 6}, {"model": "other"}])
def test_a_partial_of_other_settings_is_refused_unless_forced(collection, changes):
    before = crash_after(collection, 2)
    with pytest.raises(TraceError, match=r"was begun with model .tiny.*--force"):
        collection.run(**changes)
    assert collection.partial.read_bytes() == before
    assert not collection.engine.bodies
    collection.run(**changes, force=True)
    assert len(collection.engine.bodies) == 4


def test_a_run_that_finished_nothing_stands_in_no_ones_way(collection):
    crash_after(collection, 0)
    assert collection.partial.read_bytes().count(b"\n") == 1  # its header alone
    assert len(collection.run(model="other", max_tokens=5)) == 4
    assert {body["model"] for _, body in collection.engine.bodies} == {"other"}


def test_a_partial_of_other_prompts_is_refused(collection):
    crash_after(collection, 2)
    collection.write(LINES[::-1])
    with pytest.raises(TraceError, match="was begun with"):
        collection.run()


def test_a_collection_with_ids_does_not_go_on_from_one_without(collection):
    crash_after(collection, 2)
    with pytest.raises(TraceError, match=r"counts by the plugin, not with .*counts and ids by the plugin"):
        collection.run(ids=True)


def test_an_unfinished_collection_is_named_to_whoever_takes_it_for_a_trace(collection):
    crash_after(collection, 2)
    with pytest.raises(TraceError, match=r"out\.trace\.partial: an unfinished collection.*, not a trace"):
        ActivationTrace.load(collection.partial)


def test_a_full_disk_and_an_unusable_path_are_errors_that_name_the_file(tmp_path, monkeypatch):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}')
    file = read_prompts(prompts)
    with pytest.raises(TraceError, match="cannot be written"):
        Journal(tmp_path, Header("m", file.digest, 8, "counts"), file)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("coterie.calibration.journal.os.fsync", full)
    with (
        Journal(tmp_path / "x.partial", Header("m", file.digest, 8, "counts"), file) as journal,
        pytest.raises(TraceError, match=r"x\.partial: cannot be written: No space left"),
    ):
        journal.load(restart=False, notice=print)


# --- ids and gate values -----------------------------------------------------------------------------


class Rich:
    """A source that records ids and gate sums as well; fails at one prompt if told to."""

    records = "everything"

    def __init__(self, fails_at=None):
        self.asked = 0
        self.fails_at = fails_at

    async def model(self):
        return "rich"

    async def record(self, prompt, max_tokens):
        self.asked += 1
        if self.asked == self.fails_at:
            raise EngineError("out of memory")
        rng = np.random.default_rng(len(prompt.fields.get("prompt", "")))
        ids = random_ids(rng, max_tokens - 1, GEOMETRY)
        output = ExpertCounts(GEOMETRY, count_ids(ids, 8), max_tokens - 1, max_tokens - 1)
        gates = rng.random((2, 8), dtype=np.float32)
        counts = counts_of("x", 9)
        return TraceRecord(counts, output, max_tokens, prompt.hash, prompt.label, ids, gates, gates - 1)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


def test_ids_and_gate_sums_survive_a_crash(collection):
    options = CollectOptions(collection.prompts, collection.output, max_tokens=5, concurrency=1)
    with pytest.raises(EngineError):
        asyncio.run(run_collect(Rich(fails_at=4), options, Silent()))
    source = Rich()
    trace = asyncio.run(run_collect(source, options, Silent()))
    assert source.asked == 1
    assert trace.decode_ids.shape == (4 * 4, 2, 2)
    assert trace.gate_prob.dtype == np.float32
    at_once = asyncio.run(run_collect(Rich(), replace(options, force=True), Silent()))
    assert trace.digest() == at_once.digest()


def test_a_partial_of_another_source_is_refused(collection):
    crash_after(collection, 2)
    options = CollectOptions(collection.prompts, collection.output, max_tokens=5)
    with pytest.raises(TraceError, match=r"counts by the plugin, not with .*everything"):
        asyncio.run(run_collect(Rich(), options, Silent()))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "|O8"}, "not one of"),
        ({"shape": [4, 2, 3]}, "do not fill"),
        ({"shape": [-1, 2, 2]}, "do not fill"),
        ({"shape": [0, 10**30], "data": ""}, "is of no array"),
        ({"dtype": "<f4", "shape": [2, 2, 2], "data": "A" * 43 + "="}, "not whole numbers"),
        ({"data": "AAAA"}, "do not fill"),
        ({"data": "?"}, "base64"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_a_damaged_array_in_the_partial_is_refused(collection, changes, problem):
    options = CollectOptions(collection.prompts, collection.output, max_tokens=5, concurrency=1)
    with pytest.raises(EngineError):
        asyncio.run(run_collect(Rich(fails_at=3), options, Silent()))
    lines = [json.loads(line) for line in collection.partial.read_text().splitlines()]
    lines[1]["decode_ids"].update(changes)
    collection.partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TraceError, match=rf"partial:2 is damaged .*{problem}"):
        asyncio.run(run_collect(Rich(), options, Silent()))
