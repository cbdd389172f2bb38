import pytest

from coterie.analysis.batches import ActiveExperts, Estimate
from coterie.analysis.verdict import decide, judge_size


def batches(batch, random=50.0, reduction=None, *, placement="cluster", coverage=1.0, reason=""):
    """Random batches, and others with a reduction given as (value, low, high)."""
    active = Estimate(random, random, random)
    other = reduction and Estimate(*reduction)
    return (
        ActiveExperts("random", batch, active, None, 1.0, "", ()),
        ActiveExperts(placement, batch, other and active, other or None, coverage, reason, ()),
    )


@pytest.mark.parametrize(
    ("reduction", "level"),
    [
        ((0.22, 0.18, 0.26), "yes"),
        ((0.15, 0.10, 0.20), "yes"),
        ((0.16, 0.09, 0.23), "perhaps"),  # perhaps less than is worth it
        ((0.10, 0.02, 0.18), "perhaps"),
        ((0.10, -0.02, 0.22), "cannot tell"),  # from nothing to much
        ((0.20, -0.05, 0.45), "cannot tell"),
        ((0.05, -0.10, 0.20), "cannot tell"),
        ((0.10, -0.01, 0.14), "no"),  # perhaps nothing, and surely not much
        ((0.09, 0.07, 0.11), "no"),  # as much as random weights show
        ((-0.02, -0.05, 0.01), "no"),
    ],
)
def test_the_reduction_and_its_interval_decide(reduction, level):
    assert judge_size(*batches(32, 50.0, reduction), 64, 200).level == level


def test_too_few_requests_tell_nothing_however_large_the_reduction():
    much = (0.4, 0.3, 0.5)
    few = judge_size(*batches(8, 20.0, much), 64, 63)
    assert (few.level, few.because) == ("cannot tell", "63 held-out requests are too few; at least 64")
    part = judge_size(*batches(32, 50.0, much, coverage=0.7, reason="6 of 8 clusters are small"), 64, 200)
    assert (part.level, part.because) == ("cannot tell", "6 of 8 clusters are small")


def test_a_batch_that_activates_everything_is_named_as_the_cause():
    size = judge_size(*batches(128, 63.5, (0.01, 0.0, 0.02)), 64, 500)
    assert (size.level, size.share_active) == ("no", 63.5 / 64)
    assert "nearly all experts" in size.because
    verdict = decide(batches(128, 63.5, (0.01, 0.0, 0.02)), 64, assigned=500)
    assert "smaller batches" in verdict.advice


def test_the_best_size_gives_the_answer_and_its_numbers():
    active = (*batches(8, 20.0, (0.05, 0.04, 0.06)), *batches(32, 50.0, (0.25, 0.2, 0.3)), *batches(64, 60.0))
    verdict = decide(active, 64, assigned=300)
    assert [size.level for size in verdict.sizes] == ["no", "yes", "cannot tell"]
    assert verdict.level == "yes"
    assert "in batches of 32" in verdict.headline
    assert "25.0% fewer experts per layer than random ones (37.5 instead of 50.0 of 64)" in verdict.headline
    assert "coterie fit" in verdict.advice
    assert "Of batches of 64 this trace cannot tell" in verdict.advice
    assert "record more prompts" in verdict.advice
    assert len(verdict.because) == 3


def test_only_larger_batches_that_are_not_told_of_ask_for_more():
    smaller = decide((*batches(8, 20.0), *batches(32, 50.0, (0.25, 0.2, 0.3))), 64, assigned=300)
    assert (smaller.level, "cannot tell" in smaller.advice) == ("yes", False)
    nothing = decide((*batches(8, 20.0), *batches(32, 50.0)), 64, assigned=300)
    assert nothing.advice.startswith("Record more")
    assert "Of batches" not in nothing.advice


def test_a_cluster_that_needs_more_experts_is_not_called_fewer():
    verdict = decide(batches(8, 20.0, (-0.02, -0.05, 0.01)), 64, assigned=300)
    assert verdict.level == "no"
    assert "activate 2.0% more experts" in verdict.headline


def test_without_clusters_or_batches_nothing_is_concluded():
    random, _ = batches(8)
    verdict = decide((random,), 64, assigned=0)
    assert verdict.level == "cannot tell"
    assert "there are no held-out clusters" in verdict.because[0]
    assert decide((), 64, assigned=0).level == "cannot tell"
    assert "Record more" in decide((), 64, assigned=0).advice


def test_labels_that_know_more_than_signatures_are_pointed_out():
    _, domain = batches(32, 50.0, (0.2, 0.18, 0.22), placement="domain")
    verdict = decide((*batches(32, 50.0, (0.03, 0.02, 0.04)), domain), 64, assigned=300)
    assert verdict.level == "no"
    assert "32 requests of one label per batch activate 20.0% fewer" in verdict.because[-1]
