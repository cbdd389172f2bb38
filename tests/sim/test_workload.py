import itertools
import math

import numpy as np
import pytest

from coterie.errors import ConfigError, InputError
from coterie.sim.workload import Population, RecordedTimes, Stream, arrivals, population_of
from made_traces import domains_differ


def times_of(stream, seed=0):
    return np.array(list(stream.times_s(np.random.default_rng(seed))))


def gaps_of(stream):
    return np.diff(times_of(stream))


def test_poisson_arrivals_have_the_rate_and_gaps_as_spread_as_they_are_long():
    gaps = gaps_of(Stream(50, 400))
    assert len(gaps) == pytest.approx(20_000, rel=0.03)  # standard deviation: 141
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_sets_the_spread_of_the_gaps_and_leaves_the_rate(burstiness):
    gaps = gaps_of(Stream(50, 400, burstiness))
    assert len(gaps) == pytest.approx(20_000, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_arrivals_end_with_the_duration():
    times = times_of(Stream(100, 3.0))
    assert times[-1] < 3.0
    assert (np.diff(times) >= 0).all()


def test_recorded_times_come_back_as_they_are():
    recorded = RecordedTimes((0.0, 0.5, 0.5, 2.0))
    assert list(recorded.times_s(np.random.default_rng(0))) == [0.0, 0.5, 0.5, 2.0]
    assert recorded.rate_per_s == 2.0


@pytest.mark.parametrize("seconds", [(), (-1.0,), (2.0, 1.0), (math.nan,), (0.0, math.inf)])
def test_times_that_are_none_are_refused(seconds):
    with pytest.raises(ConfigError, match="traffic"):
        RecordedTimes(seconds)


@pytest.mark.parametrize("name", ["rate_per_s", "duration_s", "burstiness"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_stream_with_a_wrong_number_is_refused_by_its_name(name, value):
    with pytest.raises(ConfigError, match=name):
        Stream(**{"rate_per_s": 1.0, "duration_s": 1.0, "burstiness": 1.0, name: value})


def test_each_request_comes_once_before_any_comes_again():
    population = population_of(domains_differ(8))
    positions = [arrival.position for arrival in arrivals(population, Stream(100, 10), 0)]
    for start in range(0, len(positions) - 8, 8):
        assert sorted(positions[start : start + 8]) == list(range(8))
    assert positions[:8] != positions[8:16]


def test_another_rate_brings_the_same_requests_in_the_same_order():
    population = population_of(domains_differ(30))
    slow, fast = (
        [arrival.position for arrival in itertools.islice(arrivals(population, Stream(rate, 99), 5), 100)]
        for rate in (3, 70)
    )
    assert slow == fast


def test_a_recorded_request_is_what_the_decode_policy_would_see():
    trace = domains_differ(8)
    population = population_of(trace)
    arrival = next(arrivals(population, RecordedTimes((1.5,)), 0))
    i, request = arrival.position, arrival.request
    assert (arrival.time_s, arrival.number, request.id) == (1.5, 0, "0")
    assert (request.prompt_tokens, request.output_tokens) == (40, 13)
    assert (request.domain, request.prompt_hash) == (trace.labels[i], trace.prompt_hashes[i])
    assert request.counts.complete
    np.testing.assert_array_equal(request.counts.counts, trace.prefill[i])


def test_outputs_can_all_be_given_one_length():
    population = population_of(domains_differ(8), output_tokens=512)
    assert {request.output_tokens for request in population.requests} == {512}


def test_a_population_needs_requests_with_tokens():
    population = population_of(domains_differ(8))
    with pytest.raises(InputError, match="7 requests, and experts of 8"):
        Population(population.requests[:7], population.experts)
    with pytest.raises(InputError, match="request 0 has 40 prompt and 0 output tokens"):
        Population(
            tuple(
                type(request)(id="", prompt_tokens=request.prompt_tokens, output_tokens=0)
                for request in population.requests
            ),
            population.experts,
        )
