import pytest

from coterie.errors import ConfigError
from coterie.published import load_fitted, load_published
from coterie.sim.generator import Spread
from coterie.sim.made import LAYERS, made_workload, recipe_of


def recipe(workload):
    return recipe_of(load_published().workloads[workload], Spread(1, 1, 1, 1, 1), 1.0)


@pytest.mark.parametrize(("workload", "model"), [("task", "qwen"), ("language", "gptoss")])
def test_a_made_workload_has_a_calibration_set_of_other_requests(workload, model):
    made = made_workload(workload, model, requests=30, calibration=20)
    assert (len(made.population), len(made.calibration)) == (30, 20)
    assert not {request.prompt_hash for request in made.population.requests} & set(made.calibration.prompt_hashes)
    assert made.population.experts.geometry == made.calibration.geometry


def test_an_expert_of_a_made_up_layer_stands_for_one_in_each_of_the_layers_it_stands_for():
    made, step = made_workload("task", "qwen", requests=2, calibration=2), load_fitted().step["qwen"]
    assert made.step_time.per_expert_s * LAYERS == pytest.approx(step.per_expert_s * 48)


def test_domains_have_their_published_shares_and_topics_theirs_within_the_domain():
    shares = {(topic.domain, topic.name): topic.share for topic in recipe("task").topics}
    assert sum(share for (domain, _), share in shares.items() if domain == "math") == pytest.approx(2744)
    # MATH-500 has 500 of the domain's 1319 + 500 + 674 + 254 = 2747 problems
    assert shares["math", "math: math500"] == pytest.approx(2744 * 500 / 2747)


def test_languages_have_their_topics_in_common():
    topics = recipe("language").topics
    names = {domain: [t.name for t in topics if t.domain == domain] for domain in ("en", "fr")}
    assert names["en"] == names["fr"]
    assert len(names["en"]) == 12
    first, second = (next(t.share for t in topics if t.name == name) for name in ("topic 1", "topic 2"))
    assert first == pytest.approx(2 * second)


@pytest.mark.parametrize(("workload", "model", "wrong"), [("tasks", "qwen", "tasks"), ("task", "llama", "llama")])
def test_an_unknown_name_is_refused(workload, model, wrong):
    with pytest.raises(ConfigError, match=f"named '{wrong}'; there are"):
        made_workload(workload, model)
