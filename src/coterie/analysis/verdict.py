"""Is locality worth routing for?  A rule in plain sight, on the numbers of an inspection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from coterie.analysis.batches import RANDOM, ActiveExperts, Estimate

Level = Literal["yes", "perhaps", "no", "cannot tell"]

WORTH = 0.15
"""Reduction of active experts from which routing by locality is worth it.

ELDR saw 22.0 % fewer active experts go with 13.9 % lower TPOT at the median and 6.0 % at P99 (Qwen3-30B-A3B, tasks).
In proportion, 15 % are worth 9 % and 4 %.
"""

SOME = 0.10
"""Reduction below which it is not: in proportion 6 % of the median and 3 % of P99, which uneven load can cost.

It is also about what a model with random weights reaches, whose experts follow the words of a text (docs/good-fit.md).
"""

MANY_ACTIVE = 0.95
"""Share of all experts from which a random batch counts as saturated."""

FEWEST = 64
"""Held-out requests below which nothing is concluded."""

COVERAGE = 0.75
"""Share of the held-out requests that must be in clusters larger than a batch for its size to count.

Clusters that are larger than others are the more distinct ones: they alone would promise too much.
"""


@dataclass(frozen=True, slots=True)
class SizeVerdict:
    """What one batch size says.

    Attributes:
        batch: size B.
        level: see `judge_size`.
        random: active experts of random batches.
        share_active: their share of all experts.
        reduction: of held-out cluster batches; None if not measurable.
        because: why this level, in a clause.
    """

    batch: int
    level: Level
    random: float | None
    share_active: float | None
    reduction: Estimate | None
    because: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer.

    Attributes:
        level: the best level of any batch size; `cannot tell` only if no size says anything.
        headline: the answer in a sentence.
        because: the numbers that decided, a sentence each.
        advice: what to do next.
        sizes: what each batch size says.
    """

    level: Level
    headline: str
    because: tuple[str, ...]
    advice: str
    sizes: tuple[SizeVerdict, ...]


def decide(active: Sequence[ActiveExperts], experts: int, *, assigned: int) -> Verdict:
    """Judge each batch size, and answer with the best.

    Only the held-out cluster batches decide.  r and rho do not: a model whose experts were never trained has high
    ones too.  Nor does purity, which says that clusters are domains, not that domains use fewer experts.

    Args:
        active: see `active_experts`, with placements `random` and `cluster`; empty where nothing could be measured.
        experts: E.
        assigned: held-out requests that were judged; 0 if none.
    """
    random = {one.batch: one for one in active if one.placement == RANDOM}
    cluster = {one.batch: one for one in active if one.placement == "cluster"}
    sizes = tuple(judge_size(one, cluster.get(batch), experts, assigned) for batch, one in random.items())
    best = max(sizes, key=_merit, default=None)
    level: Level = best.level if best else "cannot tell"
    because = tuple(_sentence(size, experts) for size in sizes) + _labels_know_more(active)
    return Verdict(level, _headline(best, experts), because, _advice(level, sizes) + _untold(best, sizes), sizes)


def judge_size(random: ActiveExperts, cluster: ActiveExperts | None, experts: int, assigned: int) -> SizeVerdict:
    """What one batch size says, with x the reduction and [low, high] its 95 % interval.

        yes           x >= WORTH and low >= SOME
        perhaps       x >= SOME and low > 0, but not yes
        no            otherwise, if high < WORTH
        cannot tell   otherwise; also with fewer than FEWEST judged requests, or less than COVERAGE of them in clusters
                      that are larger than a batch

    Args:
        random: random batches of this size.
        cluster: held-out cluster batches of this size; None where there are no clusters.
        experts: E.
        assigned: held-out requests that were judged.
    """
    mean = random.active.value if random.active else None
    share = mean / experts if mean is not None else None
    reduction = cluster.reduction if cluster else None
    level, because = _judge(reduction, share, cluster, assigned)
    return SizeVerdict(random.batch, level, mean, share, reduction, because)


def _judge(
    reduction: Estimate | None, share: float | None, cluster: ActiveExperts | None, assigned: int
) -> tuple[Level, str]:
    if cluster is None:
        return "cannot tell", "there are no held-out clusters"
    if assigned < FEWEST:
        return "cannot tell", f"{assigned} held-out requests are too few; at least {FEWEST}"
    if reduction is None or cluster.coverage < COVERAGE:
        return "cannot tell", cluster.reason or "too few requests for random batches"
    if reduction.value >= WORTH and reduction.low >= SOME:
        return "yes", f"{WORTH:.0%} are enough"
    if reduction.value >= SOME and reduction.low > 0:
        short = f"less than the {WORTH:.0%} that are surely worth it"
        return "perhaps", short if reduction.value < WORTH else f"but it may be less than {SOME:.0%}"
    if reduction.high >= WORTH:
        return "cannot tell", "the interval is too wide"
    if share is not None and share >= MANY_ACTIVE:
        return "no", f"less than {SOME:.0%}, for any batch activates nearly all experts"
    return "no", f"less than {SOME:.0%}"


def _merit(size: SizeVerdict) -> tuple[int, float]:
    order: tuple[Level, ...] = ("cannot tell", "no", "perhaps", "yes")
    return order.index(size.level), size.reduction.value if size.reduction else 0.0


def _headline(best: SizeVerdict | None, experts: int) -> str:
    if best is None or best.reduction is None or best.random is None or best.level == "cannot tell":
        return "This trace cannot tell whether routing by locality is worth it."
    active = best.random * (1 - best.reduction.value)
    numbers = (
        f"in batches of {best.batch}, requests of one held-out cluster activate {_fewer(best.reduction)} "
        f"experts per layer than random ones ({active:.1f} instead of {best.random:.1f} of {experts})"
    )
    answers = {
        "yes": "Routing by locality is worth it: ",
        "perhaps": "Routing by locality may be worth it: ",
        "no": "Routing by locality is not worth it: at best, ",
    }
    return f"{answers[best.level]}{numbers}."


def _fewer(reduction: Estimate) -> str:
    return f"{abs(reduction.value):.1%} {'fewer' if reduction.value >= 0 else 'more'}"


def _labels_know_more(active: Sequence[ActiveExperts]) -> tuple[str, ...]:
    """A sentence for each batch size at which placing by label would be worth it, and by signature would not."""
    reductions = {(one.placement, one.batch): one.reduction for one in active}
    told = []
    for (placement, batch), reduction in reductions.items():
        own = reductions.get(("cluster", batch))
        if placement == "domain" and reduction and own and reduction.value >= WORTH > own.value:
            told.append(
                f"{batch} requests of one label per batch activate {_fewer(reduction)}: the labels know more than the "
                "signatures do."
            )
    return tuple(told)


def _sentence(size: SizeVerdict, experts: int) -> str:
    begin = f"{size.batch} requests per batch: {size.level}"
    x = size.reduction
    if x is None or size.random is None:
        return f"{begin}, {size.because}."
    interval = f"95 % interval {x.low:.1%} to {x.high:.1%}"
    return f"{begin}. {_fewer(x)} ({interval}): {size.because}. Random batches activate {size.random:.1f} of {experts}."


def _untold(best: SizeVerdict | None, sizes: Sequence[SizeVerdict]) -> str:
    """What to do about batches larger than those of the answer of which the trace says nothing."""
    if best is None or best.level == "cannot tell":
        return ""
    untold = [str(size.batch) for size in sizes if size.batch > best.batch and size.level == "cannot tell"]
    if not untold:
        return ""
    return (
        f" Of batches of {', '.join(untold)} this trace cannot tell: if your decode workers run as many requests at "
        "once, record more prompts first, and inspect again."
    )


def _advice(level: Level, sizes: Sequence[SizeVerdict]) -> str:
    if level == "yes":
        return (
            "Fit a profile (`coterie fit TRACE --clusters K`, K the number of decode workers) and serve with it "
            "(`coterie serve --profile`). Then compare TPOT with `least_load` under your own load: the reduction is "
            "what placement at the nearest centroid gives, and keeping the load even gives some of it back."
        )
    if level == "perhaps":
        return (
            "Compare the policies `locality` and `least_load` under your own load before you decide. More prompts make "
            "the intervals narrower; more clusters (`--clusters`) make batches more alike, if you have the workers."
        )
    if level == "no":
        saturated = all((size.share_active or 0) >= MANY_ACTIVE for size in sizes if size.level == "no")
        if saturated:
            return (
                "Stay with `least_load`: at these batch sizes nearly every expert is read in each step whatever is "
                "batched. It is worth another look if your decode workers run smaller batches."
            )
        return (
            "Stay with `least_load`. If your traffic has kinds of requests that this trace lacks, record them and look "
            "again; a model that was not trained, or traffic of one kind, shows nothing to gain."
        )
    return (
        "Record more: at least 64 prompts for each kind of request, with 64 output tokens or more each, on an engine "
        "that counts whole prompts and their outputs (`coterie collect`); fewer clusters (`--clusters`) leave more "
        "requests in each."
    )
