"""What `coterie inspect` says of a profile alone."""

from __future__ import annotations

from coterie.analysis.fitted import FittedCluster, ProfileInspection
from coterie.quality import Rho
from coterie.report import figures
from coterie.report.page import Figure, Section, Text, render
from coterie.report.tables import NONE, Table, number, percent, positions

ANSWER = (
    "A profile alone cannot tell whether routing by locality is worth it: it holds no decode counts. Inspect the "
    "trace (`coterie inspect TRACE --profile PROFILE`)."
)


def about_table(found: ProfileInspection) -> Table:
    """Where the profile comes from and how well its signatures do."""
    rows = [
        ("model", found.model),
        ("geometry", str(found.geometry)),
        ("signatures", f"{found.kind} over {len(found.layers)} layers: {positions(found.layers)}"),
        ("rho", _rho(found.rho)),
        ("rho within labels", _rho(found.rho_within_labels)),
        ("cohesion", number(found.cohesion, 3)),
        ("purity", number(found.purity)),
        ("trace, seed", f"{found.trace_digest}, {found.seed}"),
    ]
    if choice := found.layer_choice:
        told = f"rho {number(choice.rho_of_kept, 3)} with the layers kept, {number(choice.rho_of_all, 3)} with all"
        rows.insert(3, ("layers chosen", told))
    if donor := found.donor:
        rows.append(("clusters from", f"{donor.model}, trace {donor.trace_digest}"))
    return Table("Profile", ("", ""), tuple(rows))


def _rho(rho: Rho | None) -> str:
    return f"{number(rho.value, 3)} ({number(rho.low, 3)} to {number(rho.high, 3)})" if rho else NONE


def clusters_table(found: ProfileInspection) -> Table:
    """Each cluster and its nearest other."""
    return Table(
        "Clusters",
        (">cluster", ">requests", "most frequent label", ">its share", ">nearest", ">cosine", "experts (layer.expert)"),
        tuple(_row(k, cluster) for k, cluster in enumerate(found.clusters)),
        "The experts are those by which a centroid leads the others most; see `Profile.characteristic_experts`.",
    )


def _row(k: int, cluster: FittedCluster) -> tuple[str, ...]:
    return (
        str(k),
        str(cluster.size),
        cluster.label or NONE,
        percent(cluster.share, 0) if cluster.label else NONE,
        NONE if cluster.nearest is None else str(cluster.nearest),
        number(cluster.cosine),
        ", ".join(f"{lead.layer}.{lead.expert}" for lead in cluster.experts),
    )


def tables(found: ProfileInspection) -> list[Table]:
    """All tables."""
    return [about_table(found), clusters_table(found)]


def page(found: ProfileInspection) -> str:
    """The whole report as one HTML file.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    caption = "1 on the diagonal. Clusters with a cosine near 1 to another are hard to tell apart."
    similarity = Figure(figures.similarity_figure(found.similarity), caption)
    sections = [
        Section("Answer: cannot tell", (Text(ANSWER, strong=True),)),
        Section("Where it comes from", (about_table(found),)),
        Section("How its clusters differ", (clusters_table(found), similarity)),
    ]
    return render(f"Profile of {found.model}", f"{found.geometry}; {len(found.clusters)} clusters", sections)
