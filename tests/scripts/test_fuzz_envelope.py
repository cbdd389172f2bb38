"""A short run of the fuzzer, and that it can find something."""

import random

import fuzz_envelope
import pytest


def test_some_thousand_replies_are_read_or_refused():
    ends = fuzz_envelope.fuzz(random.Random(0), lambda done: done < 1500)
    # A fuzzer whose replies are all refused at the first look finds nothing.
    assert {"counts", "no counts", "EngineError", "WireError"} <= ends.keys()


def test_another_exception_is_a_finding(monkeypatch):
    def crash(reply):
        raise KeyError("v")

    monkeypatch.setattr(fuzz_envelope, "read", crash)
    with pytest.raises(AssertionError, match="KeyError"):
        fuzz_envelope.fuzz(random.Random(0), lambda done: done < 1)
