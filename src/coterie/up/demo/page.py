"""What the demo says: its tables, for a terminal and for a page, and the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from coterie.analysis.findings import PlottedClusters
from coterie.analysis.projection import project
from coterie.analysis.usage import domain_use
from coterie.calibration import values_of
from coterie.report import figures as inspected
from coterie.report.page import Bullets, Figure, Part, Section, Text, render
from coterie.report.tables import NONE, Table, number, percent
from coterie.routing import LOAD_POLICIES
from coterie.up.demo import figures
from coterie.up.demo.results import DemoResult, Figures, Gain, Row, expert_aware, load_balancers
from coterie.up.demo.schedule import DemoOptions

_NAMES = {
    "active_experts_mean": "experts per step",
    "experts_per_token": "experts per token",
    "cpu_ms_per_token": "decode CPU time per token",
}
_COLUMNS = {
    "tpot_p50_ms": ("TPOT P50", 1),
    "tpot_p99_ms": ("TPOT P99", 1),
    "ttft_p50_ms": ("TTFT P50", 0),
    "active_experts_mean": ("experts/step", 1),
    "live_mean": ("live/step", 1),
    "experts_per_token": ("experts/token", 2),
    "cpu_ms_per_token": ("CPU ms/token", 2),
}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_NOTE = (
    "Times in ms. `experts/step`: different experts that a step of a decode engine at full load reads, mean over steps "
    "and layers; left out where the engines do not count them. `live/step`: requests in such a step. `experts/token`: "
    "experts read per token over the whole round. `CPU ms/token`: CPU time of the decode engines' processes per output "
    "token, without threads that poll. `% per engine`: share of the requests that each got. `equal`: whether all "
    "outputs were equal, token by token, to those of the same prompts under the other policies."
)
_CROWDED = (
    "Engines that share cores lend a crowded one their time, so uneven shares (`% per engine`) cost less here than "
    "with hardware of its own for each engine: there a step takes what its `experts/step` and `live/step` take."
)
_MIXES = {
    "even": "Even mix: all domains alike.",
    "skewed": "Skewed mix: the share of the i-th domain is proportional to 1 / i.",
    "drifting": "Drifting mix: the first half of a round is of two domains, the second of two others (one each where "
    "there are fewer than four).",
}
_DOMAIN = (
    "`domain` gives engines of its own only to domains that have at least an engine's share of the calibration "
    "prompts; where none has, it is least load."
)
_VLLM = (
    "Experts are not padded for vLLM: a step of so small a model takes about as long however many it reads, so this "
    "shows where requests went, not a speed-up."
)


def headlines(result: DemoResult) -> list[str]:
    """What each expert-aware policy changed on each mix; whether outputs were equal; what else to know."""
    return [*_comparisons(result), _equality(result), *([_VLLM] if result.engine == "vllm" else [])]


def _comparisons(result: DemoResult) -> list[str]:
    """A sentence for each mix and expert-aware policy, or why there is none."""
    aware = expert_aware(result.policies)
    if not aware:
        return ["Nothing was compared: none of the policies looks at experts."]
    if not load_balancers(result.policies):
        return [f"Nothing was compared: none of the policies is a load balancer ({', '.join(LOAD_POLICIES)})."]
    return [f"{mix.capitalize()} mix: {_gained(result, mix, policy)}." for mix in result.mixes for policy in aware]


def _gained(result: DemoResult, mix: str, policy: str) -> str:
    gains = [gain for gain in result.gains if (gain.mix, gain.policy) == (mix, policy)]
    if not gains:
        return f"requests failed, so nothing can be said of {policy}"
    return f"{policy} against the best load balancer: " + "; ".join(map(_one_gain, gains))


def _one_gain(gain: Gain) -> str:
    less = f"{abs(gain.value):.1%} {'fewer' if 'experts' in gain.figure else 'less'}"
    more = f"{abs(gain.value):.1%} more"
    spread = "" if gain.low == gain.high else f", {gain.low:.1%} to {gain.high:.1%} over the repeats"
    return f"{less if gain.value >= 0 else more} {_NAMES[gain.figure]} ({gain.against}{spread})"


def _equality(result: DemoResult) -> str:
    requests = sum(row.requests for row in result.rows)
    different, errors = (sum(getattr(row, name) for row in result.rows) for name in ("outputs_different", "errors"))
    if not different and not errors:
        return f"Outputs: equal under every policy, token by token ({requests} requests)."
    why = " (sums depend on what shares a batch, so near-ties of greedy decoding can flip)" if different else ""
    return f"Outputs of {different} of {requests} requests differ from the prompt's first{why}; {errors} failed."


def mix_table(result: DemoResult, mix: str) -> Table:
    """All policies on one mix; medians over the repeats, and in a second line their spread where there are several."""
    rows: list[tuple[str, ...]] = []
    names = [name for name in _COLUMNS if any(getattr(row.figures, name) is not None for row in result.rows)]
    for row in result.rows_of(mix):
        shares = " ".join(f"{share:.0%}".removesuffix("%") for share in row.worker_shares.values())
        failed = f" ({row.errors} failed)" if row.errors else ""
        rows.append((row.policy, *_cells(row.figures, names), shares, ("yes" if row.outputs_equal else "no") + failed))
        if row.low != row.high:
            rows.append(("", *map(_range, _cells(row.low, names), _cells(row.high, names)), "", ""))
    headings = (f">{_COLUMNS[name][0]}" for name in names)
    return Table(f"{mix.capitalize()} mix", ("policy", *headings, ">% per engine", "equal"), tuple(rows))


def _cells(figures: Figures, names: Iterable[str]) -> list[str]:
    return [number(getattr(figures, name), _COLUMNS[name][1]) for name in names]


def _range(low: str, high: str) -> str:
    return NONE if low == NONE else f"{low}–{high}"


def domains_table(result: DemoResult, mix: str) -> Table:
    """Where the domains went."""
    rows = result.rows_of(mix)
    labels = list(dict.fromkeys(label for row in rows for label in row.domain_shares))
    return Table(
        f"{mix.capitalize()} mix: share of each domain on the decode engine that got most of it",
        ("policy", *(f">{label}" for label in labels)),
        tuple((row.policy, *(percent(row.domain_shares.get(label), 0) for label in labels)) for row in rows),
    )


def tables(result: DemoResult) -> list[Table]:
    """A table for each mix; the last one says how to read them."""
    *first, last = [mix_table(result, mix) for mix in result.mixes]
    note = f"{_NOTE} {_CROWDED}" if "drifting" in result.mixes else _NOTE
    return [*first, Table(last.title, last.columns, last.rows, note)]


# --- the page ------------------------------------------------------------------------------------------


def page(result: DemoResult, options: DemoOptions) -> str:
    """The whole report as one HTML file.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    subtitle = f"{result.model}, {result.trace.geometry}; {result.engine} engines: {result.profile.clusters} decode"
    sections = [
        _answer(result),
        _times(result),
        _steps(result),
        _routing(result),
        _learnt(result),
        _how(result, options),
    ]
    return render(f"The same requests under {_count(result.policies)}", subtitle, sections)


def _count(policies: Sequence[str]) -> str:
    return f"{_NUMBERS[len(policies)]} {'policy' if len(policies) == 1 else 'policies'}"


def _answer(result: DemoResult) -> Section:
    first, *others = headlines(result)
    errors = [Text(error) for error in result.first_errors]
    aware = ", ".join(expert_aware(result.policies))
    title = f"What {aware} changed" if aware else "What was measured"
    return Section(title, (Text(first, strong=True), Bullets(tuple(others)), *tables(result), *errors))


def _times(result: DemoResult) -> Section:
    caption = "All requests of all rounds: a line further to the left is faster."
    return Section("Time per output token", (Figure(figures.tpot_figure(result), caption),))


def _steps(result: DemoResult) -> Section:
    if not any(one.samples for one in result.passes):
        return Section("Active experts", (Text("The engines do not count the experts that their steps read."),))
    caption = "First round of each mix, all decode engines; mean over the MoE layers. Dashed: all experts of a layer."
    return Section("Active experts over time", (Figure(figures.active_figure(result), caption),))


def _routing(result: DemoResult) -> Section:
    caption = (
        "One engine: the signature decides alone. Several: they are as good as equal, and the least loaded is taken."
    )
    bands = [Figure(figures.band_figure(result), caption)] if figures.banded(result) else []
    return Section("Where requests went", (*bands, *(domains_table(result, mix) for mix in result.mixes)))


def _learnt(result: DemoResult) -> Section:
    trace, profile = result.trace, result.profile
    signatures = profile.transform.apply(values_of(trace, profile.transform.kind))
    labels = np.array(trace.labels)
    groups = {str(label): np.flatnonzero(labels == label) for label in dict.fromkeys(trace.labels)}
    use = domain_use(trace.decode, trace.decode_covered, groups)
    plot = PlottedClusters(project(signatures, profile.centroids), trace.labels)
    parts: list[Part] = [
        Figure(inspected.plot_figure(plot), "Prompts of the calibration; numbered circles are the centroids."),
        Figure(
            inspected.use_figure(use),
            f"Outputs of the calibration: share of a domain's tokens that chose an expert, up to "
            f"{percent(float(use.share.max()), 0)} (full colour).",
        ),
    ]
    return Section("What was learnt before", tuple(parts))


def _how(result: DemoResult, options: DemoOptions) -> Section:
    o = options
    said = f"""
        A trace of {len(result.trace)} prompts was collected, and one cluster fitted for each decode engine; the
        requests served are other prompts.

        {o.requests} requests a round, {o.concurrency} in flight, {o.max_tokens} output tokens each, greedy. Rounds of
        each mix: {o.rounds}, with prompts of its own each. Repeats of all rounds, with other prompts: {o.repeats};
        figures are medians over them.

        Within a round all policies serve the same requests in turn, in every second round in reverse. All
        prompts were in the prefill engine's prefix cache before, so that no policy pays for another.

        Full load: at least two thirds of an engine's share of the requests in flight, on average over the decode
        engines; at the beginning and at the end of a round there are fewer.

        {" ".join(_MIXES[mix] for mix in result.mixes)}

        On a machine with fewer cores than engines, times by the clock are noisy; active experts and CPU time are the
        fair measures.

        {_DOMAIN if "domain" in result.policies else ""}
    """
    items = (" ".join(item.split()) for item in said.split("\n\n"))
    return Section("How it was measured", (Bullets(tuple(filter(None, items))),))


def as_json(result: DemoResult, options: DemoOptions) -> dict[str, object]:
    """The result as plain values: rows with medians, their spread, and gains."""
    return {
        "model": result.model,
        "engine": result.engine,
        "geometry": str(result.trace.geometry),
        "options": {
            name: getattr(options, name)
            for name in ("requests", "concurrency", "max_tokens", "rounds", "repeats", "seed")
        },
        "rows": [_json_row(row) for row in result.rows],
        "gains": [{name: getattr(gain, name) for name in Gain.__slots__} for gain in result.gains],
        "first_errors": list(result.first_errors),
    }


def _json_row(row: Row) -> dict[str, object]:
    spread = {name: [getattr(row.low, name), getattr(row.high, name)] for name in Figures.__slots__}
    figures = {name: getattr(row.figures, name) for name in Figures.__slots__}
    counts = {name: getattr(row, name) for name in ("outputs_equal", "outputs_different", "requests", "errors")}
    shares = {"worker_shares": dict(row.worker_shares), "domain_shares": dict(row.domain_shares)}
    return {"mix": row.mix, "policy": row.policy, **figures, **counts, **shares, "spread": spread}
