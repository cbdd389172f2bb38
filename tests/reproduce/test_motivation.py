from coterie.core import ModelGeometry
from coterie.published import Domain, Prompts, Workload
from coterie.reproduce.motivation import BATCH_SIZES, measure
from coterie.sim.generator import Spread
from coterie.sim.made import recipe_of

GEOMETRY = ModelGeometry(layers=2, experts=64, top_k=4)
WORKLOAD = Workload(
    output_tokens=200,
    measured=["a", "b"],
    prompts=Prompts(100, 0.5, 4, 1024),
    domains={"a": Domain(3, {"only": 1}), "b": Domain(1, {"only": 1})},
)


def measured(**spread):
    parts = dict.fromkeys(("shared", "domain", "topic", "request", "phase"), 0.0) | spread
    return measure(recipe_of(WORKLOAD, Spread(**parts), 1.0), WORKLOAD, GEOMETRY, 120)


def test_domains_that_differ_activate_fewer_experts_by_themselves():
    apart, alike = measured(domain=2.0), measured(shared=2.0)
    for size in BATCH_SIZES:
        assert apart.same_domain[size] > 0.1
        assert abs(alike.same_domain[size]) < 0.02


def test_prefill_foretells_decode_where_requests_keep_to_their_experts():
    kept, lost = measured(request=1.5), measured(phase=1.5)
    assert kept.r > 0.9
    assert kept.rho["count_idf"] > 0.5
    assert abs(lost.r) < 0.1
    assert abs(lost.rho["count_idf"]) < 0.1
