import itertools
import math

import numpy as np
import pytest

from coterie.errors import ConfigError, InputError
from coterie.sim.workload import Drift, Mix, Population, RecordedTimes, Stream, arrivals, population_of
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


# --- mixes ---


def positions_of(mix, *, rate=100, seconds=40, later=()):
    population = population_of(domains_differ(16))
    drift = Drift(((0.0, Mix(tuple(mix.items()))), *((time_s, Mix(tuple(m.items()))) for time_s, m in later)))
    return [(one.time_s, one.position) for one in arrivals(population, Stream(rate, seconds), 3, drift)]


def shares(positions):
    return np.bincount([position % 4 for _, position in positions], minlength=4) / len(positions)


def test_domains_come_in_proportion_to_their_weights():
    # 4000 arrivals: a share of 0.75 has a standard deviation of 0.007
    found = shares(positions_of({"domain 0": 6.0, "domain 2": 2.0}))
    assert found == pytest.approx([0.75, 0, 0.25, 0], abs=0.03)


def test_the_mix_is_that_of_the_time_of_arrival():
    positions = positions_of({"domain 0": 1}, later=[(20.0, {"domain 1": 1, "domain 3": 1}), (30.0, {"domain 2": 1})])
    assert {position % 4 for time_s, position in positions if time_s < 20} == {0}
    assert {position % 4 for time_s, position in positions if 20 <= time_s < 30} == {1, 3}
    assert {position % 4 for time_s, position in positions if time_s >= 30} == {2}


def test_within_a_domain_each_request_comes_once_before_any_comes_again():
    for domain in range(4):
        of_domain = [p for _, p in positions_of({f"domain {d}": 1.0 for d in range(4)}) if p % 4 == domain]
        for start in range(0, len(of_domain) - 4, 4):
            assert sorted(of_domain[start : start + 4]) == [domain + 4 * i for i in range(4)]


def test_another_mix_brings_the_same_requests_of_a_domain_at_the_same_times():
    even, skewed = ([*positions_of({"domain 0": weight, "domain 1": 1.0})] for weight in (1.0, 9.0))
    assert [time_s for time_s, _ in even] == [time_s for time_s, _ in skewed]
    of_first = [[p for _, p in positions if p % 4 == 0] for positions in (even, skewed)]
    assert of_first[1][: len(of_first[0])] == of_first[0]


def test_a_domain_of_weight_zero_never_comes():
    assert {p % 4 for _, p in positions_of({"domain 0": 0.0, "domain 1": 1.0, "domain 2": 0.0})} == {1}


def test_a_mix_of_one_share_for_each_domain_is_drawn_by_weight_at_the_ends_of_the_interval():
    mix = Mix((("a", 0.0), ("b", 1.0), ("c", 3.0), ("d", 0.0)))
    assert [mix.draw(chance) for chance in (0.0, 0.2499, 0.25, math.nextafter(1, 0))] == ["b", "b", "c", "c"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((("a", -1.0),), "weight of 'a'"),
        ((("a", math.inf),), "weight of 'a'"),
        ((("a", 0.0),), "no domain has a weight"),
        ((), "no domain has a weight"),
        ((("a", 1.0), ("a", 1.0)), "'a' comes twice"),
    ],
)
def test_a_mix_that_cannot_be_drawn_from_is_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        Mix(weights)


@pytest.mark.parametrize("times", [(), (1.0,), (0.0, 5.0, 5.0), (0.0, 5.0, 4.0), (0.0, math.inf)])
def test_a_drift_begins_at_0_and_goes_on(times):
    with pytest.raises(ConfigError, match="drift"):
        Drift(tuple((time_s, Mix((("a", 1.0),))) for time_s in times))


def test_a_domain_without_requests_is_named_with_those_that_there_are():
    with pytest.raises(ConfigError, match="no request is of 'zh'; there are domain 0, domain 1"):
        positions_of({"domain 0": 1.0, "zh": 1.0})
