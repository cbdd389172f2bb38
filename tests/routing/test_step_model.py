"""What a request costs besides experts, learned from step times."""

import numpy as np
import pytest

from coterie.routing.step_model import Meter, Seen, StepModel


def observed(model, requests, active, step_s):
    """A request that lived for a second among so many."""
    model.observe(Seen(1.0, 5.0, 7.0), Seen(2.0, 5.0 + requests, 7.0 + active), step_s)


def made(count, per_request, per_expert, rng, noise=0.0):
    """Batches in which requests and active experts vary by themselves, and their steps."""
    for _ in range(count):
        requests, active = rng.uniform(5, 60), rng.uniform(100, 300)
        step_s = 5e-3 + per_request * requests + per_expert * active
        yield requests, active, step_s * np.exp(noise * rng.normal())


def test_before_anything_is_measured_a_request_costs_the_prior():
    assert StepModel(40).per_request == pytest.approx(0.03 * 40)


def test_costs_that_can_be_told_apart_are_found():
    model = StepModel(40)
    for one in made(2000, 2e-4, 2e-5, np.random.default_rng(0), noise=0.02):
        observed(model, *one)
    assert model.per_request == pytest.approx(10, rel=0.15)  # 2e-4 / 2e-5


def test_stalls_change_little():
    rng, model = np.random.default_rng(0), StepModel(40)
    for requests, active, step_s in made(2000, 2e-4, 2e-5, rng, noise=0.02):
        observed(model, requests, active, step_s * (10 if rng.random() < 0.03 else 1))
    assert model.per_request == pytest.approx(10, rel=0.25)


def test_what_grows_together_is_divided_as_the_prior_has_it():
    model = StepModel(40)
    for i in range(1000):
        requests = 5 + i % 40
        observed(model, requests, 10 * requests, 1e-3 * (40 + 11.2 * requests))  # 1.2 + 10: the prior's own slope
    assert model.per_request == pytest.approx(1.2, rel=0.02)


def test_a_worker_whose_experts_cost_nothing_is_balanced_by_load():
    model = StepModel(40)
    for one in made(2000, 2e-4, 0.0, np.random.default_rng(0), noise=0.01):
        observed(model, *one)
    assert model.per_request > 100


def test_a_new_engine_is_learned_anew():
    rng, model = np.random.default_rng(0), StepModel(40)
    for one in (*made(1500, 2e-4, 2e-5, rng), *made(6000, 4e-4, 2e-5, rng)):
        observed(model, *one)
    assert model.per_request == pytest.approx(20, rel=0.15)


def test_a_life_without_length_tells_nothing():
    model = StepModel(40)
    model.observe(Seen(1.0, 5.0, 7.0), Seen(1.0, 5.0, 7.0), 0.01)
    observed(model, 4, 50, 0.0)
    assert model.observations == 0


def test_a_meter_integrates_what_was_between_its_calls():
    meter = Meter()
    meter.advance(1.0, 0, 0)
    meter.advance(3.0, 2, 10)
    assert meter.advance(3.5, 4, 20) == Seen(3.5, 6.0, 30.0)  # 2 s of (2, 10) and half of (4, 20)
