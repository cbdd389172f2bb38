"""What `coterie inspect` says of a trace: its tables, and the page made of them."""

from __future__ import annotations

from coterie.analysis.batches import RANDOM, ActiveExperts, Estimate
from coterie.analysis.correlation import Correlation, Spread
from coterie.analysis.findings import Inspection, KindQuality, Subject
from coterie.analysis.heldout import ClusterReport
from coterie.analysis.usage import LayerSkew
from coterie.quality import LayerSelection, Rho
from coterie.report import figures
from coterie.report.page import Bullets, Figure, Part, Section, Text, render
from coterie.report.tables import NONE, Table, number, percent, positions

PROOF = (
    (
        "What proves locality: batches of held-out requests of one cluster activate clearly fewer experts than random "
        "batches of the same size. Held-out means that the clusters were found without these requests."
    ),
    (
        "What proves nothing alone: r and rho. A model with random weights has high ones too, since each request keeps "
        "to its own experts in prefill and in decode. Batching gains only by experts that different requests share."
    ),
    "Nor does purity alone: it says that clusters are the domains, not that a domain uses fewer experts.",
)

MOST_ROWS = 3
MOST_LABELS = 24


def subject_table(subject: Subject, seed: int) -> Table:
    """What was inspected, and what was left out."""
    rows = [
        ("model", subject.model),
        ("geometry", str(subject.geometry)),
        ("requests", f"{subject.used} of {subject.requests} used"),
        ("left out", _left_out(subject)),
        ("tokens", f"{subject.prompt_tokens} of prompts, {subject.output_tokens} of outputs"),
        ("labels", _labels(subject)),
        ("trace, seed", f"{subject.digest}, {seed}"),
    ]
    return Table("Trace", ("", ""), tuple(rows))


def _labels(subject: Subject) -> str:
    """Labels and their requests; of many the most frequent."""
    labels = list(subject.labels.items())
    more = len(labels) - MOST_LABELS
    if more > 0:
        labels = sorted(labels, key=lambda one: -one[1])[:MOST_LABELS]
    named = [f"{name or '(none)'} {count}" for name, count in labels]
    return ", ".join([*named, f"{more} more"] if more > 0 else named)


def _left_out(subject: Subject) -> str:
    reasons = {
        "with a prompt that was only partly counted": subject.partly_counted,
        "without counted output": subject.without_output,
        "with the prompt of an earlier one": subject.repeated,
    }
    return "; ".join(f"{count} {reason}" for reason, count in reasons.items() if count) or "none"


def correlation_table(found: Correlation) -> Table:
    """Values of r and its controls."""
    rows = {"own output": found.own, "another of its label": found.same_domain, "another request": found.other}
    return Table(
        "Correlation r of a prompt's experts with those of an output",
        ("output", ">mean r", ">deviation", ">5 % to 95 %", ">requests"),
        tuple(_spread_row(name, spread) for name, spread in rows.items()),
        "Own above another request: a prompt foretells its output. Another of its label above another request: "
        "requests of a label share experts.",
    )


def _spread_row(name: str, spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return (name, *[NONE] * 4)
    between = f"{number(spread.low)} to {number(spread.high)}"
    return name, number(spread.mean), number(spread.deviation), between, str(spread.count)


def quality_table(quality: tuple[KindQuality, ...]) -> Table:
    """Values of rho of each kind of signature."""
    rows = tuple((one.kind, *_rho_cells(one.rho), *_rho_cells(one.within)) for one in quality)
    columns = ("signature", ">rho", ">95 %", ">same label", ">95 %")
    return Table("How well signatures foretell shared experts (rho, all layers)", columns, rows)


def _rho_cells(rho: Rho | None) -> tuple[str, str]:
    return (number(rho.value, 3), f"{number(rho.low, 3)} to {number(rho.high, 3)}") if rho else (NONE, NONE)


def layers_table(selection: LayerSelection) -> Table:
    """Layers kept, and what they bring."""
    rows = (
        ("kept", f"{len(selection.layers)} of {len(selection.order)}: {positions(selection.layers)}"),
        ("rho of these", number(selection.rho, 3)),
        ("rho of all", number(selection.curve[-1], 3)),
    )
    return Table("Layers kept by greedy selection", ("", ""), rows)


def active_table(active: tuple[ActiveExperts, ...], experts: int, method: str) -> Table:
    """Active experts of each batch size and placement."""
    notes = [f"{one.placement} {one.batch}: {one.reason}" for one in active if one.reason]
    note = {
        "replayed": "Outputs replayed step by step from their expert ids.",
        "expected": "Expected union of outputs at independent steps, from counts (no ids were recorded).",
    }[method]
    return Table(
        f"Active experts per layer and decode step, of {experts}",
        (">batch", "drawn from", ">active", ">95 %", ">fewer", ">95 %", ">measured on"),
        tuple(_active_row(one) for one in active),
        " ".join([note, *(f"{text}." for text in notes)]),
    )


def _active_row(one: ActiveExperts) -> tuple[str, ...]:
    active = (number(one.active.value, 1), _between(one.active)) if one.active else (NONE, NONE)
    fewer = ("", "") if one.placement == RANDOM else (NONE, NONE)
    if one.reduction:
        fewer = (percent(one.reduction.value), f"{percent(one.reduction.low)} to {percent(one.reduction.high)}")
    name = {RANDOM: "all requests", "domain": "one label", "cluster": "one cluster"}[one.placement]
    return str(one.batch), name, *active, *fewer, percent(one.coverage, 0)


def _between(estimate: Estimate) -> str:
    return f"{number(estimate.low, 1)} to {number(estimate.high, 1)}"


def clusters_table(report: ClusterReport) -> Table:
    """Held-out clusters."""
    rows = tuple(
        (str(k), str(one.size), one.label or NONE, percent(one.share, 0) if one.label else NONE)
        for k, one in enumerate(report.clusters)
    )
    source = f"{report.fitted} other requests of the trace" if report.fitted else f"another trace, of {report.model}"
    purity = (
        f"purity {number(report.purity)} (one cluster: {number(report.purity_of_one)}), "
        if report.purity is not None
        else ""
    )
    zero = f", {report.zero} left out for a zero signature" if report.zero else ""
    return Table(
        "Held-out clusters",
        (">cluster", ">requests", "most frequent label", ">its share"),
        rows,
        f"{report.assigned} requests at the nearest centroid{zero}; centroids of {source}, {report.kind} over layers "
        f"{positions(report.layers)}; {purity}largest cluster {number(report.largest_over_mean)} times the mean.",
    )


def skew_table(skew: tuple[LayerSkew, ...], most: int | None = None) -> Table:
    """Skew of each layer, or of the `most` most skewed ones."""
    shown = sorted(sorted(skew, key=lambda one: -one.gini)[:most], key=lambda one: one.layer)
    title = (
        "Expert skew" if len(shown) == len(skew) else f"Expert skew: the {len(shown)} most skewed of {len(skew)} layers"
    )
    rows = tuple(
        (
            str(one.layer),
            number(one.max_over_mean, 1),
            number(one.gini),
            str(one.unused),
            ", ".join(f"{hot.expert} ({percent(hot.share, 0)})" for hot in one.hot),
        )
        for one in shown
    )
    return Table(title, (">layer", ">max / mean", ">Gini", ">unused", "hot experts (share of tokens)"), rows)


def missing_table(found: Inspection) -> Table:
    """What could not be measured."""
    return Table("Not measured", ("what", "why"), tuple((one.part, one.reason) for one in found.missing))


def tables(found: Inspection) -> list[Table]:
    """All tables, in the order in which a person wants them; long ones cut short."""
    E = found.subject.geometry.experts
    chosen = [
        found.active and found.method and active_table(found.active, E, found.method),
        found.clusters and clusters_table(found.clusters),
        found.correlation and correlation_table(found.correlation),
        found.quality and quality_table(found.quality),
        found.selection and layers_table(found.selection),
        skew_table(found.skew, MOST_ROWS),
        missing_table(found) if found.missing else None,
    ]
    return [subject_table(found.subject, found.seed), *(table for table in chosen if table)]


# --- the page ------------------------------------------------------------------------------------------


def page(found: Inspection) -> str:
    """The whole report as one HTML file.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    sections = [_answer(found), _batches(found), _clusters(found), _foretelling(found), _experts(found)]
    subject = Section("What was inspected", (subject_table(found.subject, found.seed),))
    missing = [Section("Not measured", (missing_table(found),))] if found.missing else []
    title = f"Is {found.subject.model} a good fit for routing by locality?"
    about = f"{found.subject.geometry}; {found.subject.used} requests"
    return render(title, about, [*(one for one in sections if one.parts), *missing, subject])


def _answer(found: Inspection) -> Section:
    verdict = found.verdict
    because = (Bullets(verdict.because),) if verdict.because else ()
    return Section(
        f"Answer: {verdict.level}",
        (Text(verdict.headline, strong=True), *because, Text(f"What next: {verdict.advice}")),
    )


def _batches(found: Inspection) -> Section:
    parts: list[Part] = [Bullets(PROOF)]
    if found.active and found.method:
        E = found.subject.geometry.experts
        caption = "Mean with 95 % interval, and the change against random batches. Lower is cheaper to decode."
        parts.append(Figure(figures.active_figure(found.active, E), caption))
        parts.append(active_table(found.active, E, found.method))
    return Section("Active experts: what locality is to lower", tuple(parts))


def _clusters(found: Inspection) -> Section:
    parts: list[Part] = []
    if found.clusters:
        parts.append(clusters_table(found.clusters))
    if found.plot:
        caption = "Held-out signatures, coloured by label; numbered circles are the centroids."
        parts.append(Figure(figures.plot_figure(found.plot), caption))
    return Section("Clusters", tuple(parts))


def _foretelling(found: Inspection) -> Section:
    parts: list[Part] = []
    if found.correlation:
        caption = "r of prompts with outputs. An untrained model has a high r too."
        parts += [Figure(figures.correlation_figure(found.correlation), caption), correlation_table(found.correlation)]
    if found.quality:
        caption = "rho of each kind of signature over all layers."
        parts += [Figure(figures.quality_figure(found.quality), caption), quality_table(found.quality)]
    if found.selection:
        caption = "rho as the best next layer is added; the circle is where layers are cut."
        parts += [Figure(figures.selection_figure(found.selection), caption), layers_table(found.selection)]
    return Section("Do prompts foretell the experts of decoding?", tuple(parts))


def _experts(found: Inspection) -> Section:
    parts: list[Part] = []
    if found.use:
        most = percent(float(found.use.share.max()), 0)
        caption = f"Share of a group's tokens that chose an expert: from none to {most} (full colour)."
        parts.append(Figure(figures.use_figure(found.use), caption))
        caption = "Share of expert choices that a group makes differently from the mean of all groups."
        parts.append(Figure(figures.difference_figure(found.use), caption))
    parts += [Figure(figures.skew_figure(found.skew), "0: all experts are used alike."), skew_table(found.skew)]
    return Section("Experts", tuple(parts))
