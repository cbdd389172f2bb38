import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError, InputError
from coterie.latency import (
    QWEN3_30B_MI300X,
    StepPoint,
    StepTime,
    TokenTime,
    fit_step_time,
    mean_error,
    read_step_points,
)

CONSTANTS = st.floats(1e-6, 1.0)


def points_of(times):
    """Six steps in which requests and active experts vary by themselves."""
    grid = [(1, 8), (1, 300), (32, 500), (32, 100), (64, 6000), (128, 900)]
    return [StepPoint(n, active, times.step_s(n, active)) for n, active in grid]


def test_a_step_is_the_sum_of_its_three_parts():
    # 2 ms + 10 requests x 0.1 ms + 300 experts x 0.01 ms = 2 + 1 + 3 ms
    assert StepTime(2e-3, 1e-4, 1e-5).step_s(10, 300) == pytest.approx(6e-3)


def test_the_rest_is_straight_between_its_points_and_level_beyond_them():
    times = StepTime(1e-3, 0, 0, rest=((10, 4e-3), (20, 8e-3), (40, 2e-3)))
    assert [round(1e3 * times.step_s(n, 99), 9) for n in (1, 10, 15, 20, 30, 40, 200)] == [5, 5, 7, 9, 6, 3, 3]


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1)), min_size=1, max_size=6, unique_by=lambda p: p[0]))
def test_the_rest_is_what_numpy_interpolates(points):
    times = StepTime(1.0, 0, 0, rest=tuple(sorted(points)))
    x, y = zip(*times.rest, strict=True)
    for requests in (*x, 0.5, 77.7, 301):
        assert times.step_s(requests, 0) - 1 == pytest.approx(np.interp(requests, x, y), abs=1e-12)


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        (((2, 1e-3), (2, 1e-3)), "must ascend in requests, got 2 after 2"),
        (((2, -1e-3),), "rest at 2 requests must be finite and not negative"),
        (((math.nan, 1e-3),), "must ascend in requests, got nan"),
        (((1, 0.0), (2, 0.0)), "time would stand still"),
    ],
)
def test_points_of_the_rest_ascend_and_take_time(rest, problem):
    with pytest.raises(InputError, match=problem):
        StepTime(0, 0, 0, rest=rest)


def test_a_time_by_tokens_is_a_fixed_part_and_one_per_token():
    assert TokenTime(0.05, 1e-4).seconds(200) == pytest.approx(0.07)


def test_the_expert_part_is_read_off_figure_2a_as_its_comment_says():
    # c + 128 s = 4.7 (c + 16 s)  =>  c = (128 - 4.7 x 16) s / 3.7;   c + 100 s = 0.35 ms
    slope_s = 0.35e-3 / ((128 - 4.7 * 16) / 3.7 + 100)
    assert pytest.approx(slope_s, rel=2e-3) == QWEN3_30B_MI300X.per_expert_s


@given(CONSTANTS, CONSTANTS, CONSTANTS)
def test_a_fit_finds_the_constants_of_exact_points(fixed, per_request, per_expert):
    times = StepTime(fixed, per_request, per_expert)
    fitted = fit_step_time(points_of(times))
    assert mean_error(fitted, points_of(times)) < 1e-6


def test_a_fit_to_scattered_points_is_the_least_squares_of_relative_errors():
    true, rng = StepTime(7e-3, 4e-5, 3e-6), np.random.default_rng(0)
    points = [StepPoint(n, 60.0 * n**0.8 * f, 1.0) for n in (1, 8, 32, 64) for f in (0.7, 1, 1.3)]
    noisy = [StepPoint(p.requests, p.active, true.step_s(p.requests, p.active) * rng.uniform(0.9, 1.1)) for p in points]

    def loss(times):
        return sum((times.step_s(p.requests, p.active) / p.step_s - 1) ** 2 for p in noisy)

    fitted = fit_step_time(noisy)
    for name in ("fixed_s", "per_request_s", "per_expert_s"):
        for factor in (0.99, 1.01):
            parts = {part: getattr(fitted, part) for part in ("fixed_s", "per_request_s", "per_expert_s")}
            parts[name] *= factor
            assert loss(StepTime(**parts)) >= loss(fitted)


def test_no_constant_of_a_fit_is_negative():
    # A straight fit would have steps get shorter with each request.
    points = [StepPoint(1, 10, 5e-3), StepPoint(64, 10, 4e-3), StepPoint(1, 100, 9e-3), StepPoint(64, 100, 8e-3)]
    assert fit_step_time(points).per_request_s == 0


@pytest.mark.parametrize(
    "points", [[], [StepPoint(4, 40, 1e-3)] * 9, [StepPoint(n, 10 * n, 1e-3) for n in range(1, 9)]]
)
def test_points_that_cannot_tell_the_parts_apart_are_refused(points):
    with pytest.raises(InputError, match="vary by themselves"):
        fit_step_time(points)


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_constants_that_are_no_times_are_refused(value):
    with pytest.raises(InputError, match="per_expert_s must be finite"):
        StepTime(1e-3, 0.0, value)
    with pytest.raises(InputError, match="fixed_s must be finite"):
        TokenTime(value, 0.0)


def test_steps_that_take_no_time_are_refused():
    with pytest.raises(InputError, match="time would stand still"):
        StepTime(0.0, 0.0, 0.0)


def test_measured_steps_are_read_from_a_csv_file(tmp_path):
    file = tmp_path / "steps.csv"
    file.write_text("requests,active_experts,step_ms\n1,20.5,3.25\n32,400,9\n")
    assert read_step_points(file) == (StepPoint(1, 20.5, 3.25e-3), StepPoint(32, 400, 9e-3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line must be requests,active_experts,step_ms"),
        ("a,b\n1,2\n", "not 'a,b'"),
        ("requests,active_experts,step_ms\n1,2,3\n1,2\n", "line 3: not enough values"),
        ("requests,active_experts,step_ms\n1,2,fast\n", "line 2: could not convert"),
        ("requests,active_experts,step_ms\n1,2,0\n", "line 2: step point: step_s must be finite and above zero, got 0"),
        ("requests,active_experts,step_ms\nnan,2,1\n", "line 2: step point: requests must be finite"),
    ],
)
def test_a_file_of_steps_that_is_wrong_is_answered_with_its_line(tmp_path, text, message):
    file = tmp_path / "steps.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_step_points(file)


def test_a_file_of_steps_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.csv: cannot be read"):
        read_step_points(tmp_path / "nowhere.csv")
