"""The engine around a real checkpoint: the same words, whatever else runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie import wire
from coterie.engines.embedded.engine import Engine, EngineConfig
from coterie.engines.embedded.request import Submission
from coterie.engines.embedded.sampling import SamplingParams
from coterie.engines.embedded.scheduler import Limits
from coterie.engines.embedded.text import Tokenizer
from coterie.modeling import Model, prepare

FIXTURE = Path("models/coterie-tiny").resolve()
TEXTS = ["Once upon a time", "def main(", "In the beginning God created", "Once upon a time there was a man who"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model.open(prepare(FIXTURE, tmp_path_factory.mktemp("packed")))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(FIXTURE)


def submission(tokenizer, number):
    params = SamplingParams(
        max_tokens=14, temperature=0.8 if number % 2 else 0.0, top_p=0.9, seed=number, ignore_eos=True
    )
    return Submission(str(number), tokenizer.encode(TEXTS[number]), params, asked=wire.ASK_COUNTS)


def serve(model, tokenizer, numbers, blocks, **limits):
    """Outputs of requests that run together: tokens, text, and experts of the prompt and the output."""
    kv = np.full(model.kv_shape(blocks, 4), np.nan, np.float32)
    config = EngineConfig(blocks, 4, 64, limits=Limits(**limits))
    engine, heard = Engine(model, tokenizer, kv, config, rng=np.random.default_rng(0)), []
    for number in numbers:
        engine.submit(submission(tokenizer, number), heard.append)
    while engine.step():
        pass
    found = {}
    for number in numbers:
        own = [news for news in heard if news.request_id == str(number)]
        experts = (own[-1].finish.prompt_counts.counts, own[-1].finish.output_counts.counts)
        found[number] = ([news.token_id for news in own], "".join(news.text for news in own), experts)
    return found, engine.stats()


def test_outputs_and_experts_are_bit_for_bit_those_of_each_request_alone(model, tokenizer):
    alone = {number: serve(model, tokenizer, [number], 16)[0][number] for number in range(4)}
    together, _ = serve(model, tokenizer, [0, 1, 2, 3], 64)
    chunked, tight = serve(model, tokenizer, [3, 2, 1, 0], 11, running=4, step_tokens=4)
    assert tight.preemptions + tight.prefix_hits > 0
    for found in (together, chunked):
        for number, (tokens, text, experts) in alone.items():
            assert found[number][:2] == (tokens, text)
            assert all(np.array_equal(*pair) for pair in zip(found[number][2], experts, strict=True))
    assert alone[0][1] == tokenizer.decode(alone[0][0])
