"""`coterie fit`: a routing profile from a recorded trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from coterie.activations import ActivationTrace
from coterie.calibration import Profile, transfer
from coterie.calibration import fit as fit_profile
from coterie.calibration.fit import Layers, Progress
from coterie.errors import ConfigError
from coterie.files import check_target
from coterie.quality import DEFAULT_PAIRS, Rho
from coterie.report.tables import printable
from coterie.signature import KINDS, Kind

_PATH = click.Path(path_type=Path, dir_okay=False)
_RULES: dict[str, Layers] = {"greedy": "greedy", "all": "all"}
_MOST_NAMED = 3  # labels of a cluster in the table


def _read_layers(ctx: click.Context, param: click.Parameter, value: str | None) -> Layers | None:
    if value is None or value in _RULES:
        return _RULES[value] if value else None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither greedy nor all nor positions such as 0,3,5") from None


@dataclass(frozen=True, slots=True)
class _Options:
    trace: Path
    clusters: int
    output: Path
    transform: Kind
    layers: Layers | None
    pairs: int
    seed: int
    starts: int | None
    like: Path | None
    like_trace: Path | None
    force: bool


@click.command()
@click.argument("trace", type=_PATH)
@click.option("--clusters", type=click.IntRange(min=1), required=True, help="Number of decode groups.")
@click.option("--output", type=_PATH, required=True, help="Profile to write.")
@click.option(
    "--transform",
    type=click.Choice(KINDS),
    default="count_idf",
    show_default=True,
    help="What signatures are made of; gateways can route by the first four.",
)
@click.option(
    "--layers",
    metavar="greedy|all|POSITIONS",
    callback=_read_layers,
    help="Layers of a signature: chosen by how well they foretell decoding, all, or positions such as 0,3,5."
    "  [default: greedy; all with --like]",
)
@click.option(
    "--pairs",
    type=click.IntRange(min=1),
    default=DEFAULT_PAIRS,
    show_default=True,
    help="Pairs of requests to measure on, and to choose layers by.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same bytes.")
@click.option("--starts", type=click.IntRange(min=1), help="Seedings to try.  [default: 5]")
@click.option("--like", type=_PATH, help="Profile of another model: divide prompts as its clusters do.")
@click.option("--like-trace", type=_PATH, help="Trace that this profile was fitted to.")
@click.option("--force", is_flag=True, help="Overwrite an existing profile.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
def fit(as_json: bool, **given: Any) -> None:
    """Fit a routing profile from TRACE, a file written by `coterie collect`.

    With --like and --like-trace, few prompts are enough: those that the other model ran too are divided as it
    divides them.
    """
    options = _Options(**given)
    _check(options)
    with _status() as progress:
        profile = _fit(options, progress)
    profile.save(options.output)
    if as_json:
        click.echo(msgspec.json.encode(_report(profile, options.output)))
    else:
        _show(profile, options.output)


def _check(options: _Options) -> None:
    if options.output.exists() and not options.force:
        raise ConfigError(f"{options.output} exists; give another --output, or --force to overwrite it")
    check_target(options.output, [one for one in (options.trace, options.like, options.like_trace) if one])
    if (options.like is None) != (options.like_trace is None):
        raise ConfigError("--like and --like-trace belong together: a profile, and the trace that it was fitted to")
    if options.like and options.starts:
        raise ConfigError("--starts has no meaning with --like: the other model's clusters are the only start")


@contextmanager
def _status() -> Iterator[Progress]:
    """What is done at present, on stderr if that is a terminal."""
    with Console(stderr=True).status("reading the trace") as status:
        yield status.update


def _fit(options: _Options, progress: Progress) -> Profile:
    trace = ActivationTrace.load(options.trace)
    same: dict[str, Any] = {
        "seed": options.seed,
        "kind": options.transform,
        "pairs": options.pairs,
        "progress": progress,
    }
    if options.like and options.like_trace:
        donor = Profile.load(options.like)
        if donor.clusters != options.clusters:
            raise ConfigError(
                f"{options.like} has {donor.clusters} clusters, not {options.clusters}: give --clusters "
                f"{donor.clusters}, or fit the other model again with --clusters {options.clusters}"
            )
        donor_trace = ActivationTrace.load(options.like_trace)
        return transfer(trace, donor_trace, donor, layers=options.layers or "all", **same)
    return fit_profile(trace, options.clusters, starts=options.starts or 5, layers=options.layers or "greedy", **same)


def _report(profile: Profile, output: Path) -> dict[str, Any]:
    transform = profile.transform
    return {
        "profile": str(output),
        "model": profile.model,
        "geometry": profile.geometry,
        "transform": transform.kind,
        "layers": transform.layers,
        "layer_choice": profile.layer_choice,
        "rho": profile.rho,
        "rho_within_labels": profile.rho_within_labels,
        "trace_digest": profile.trace_digest,
        "seed": profile.seed,
        "donor": profile.donor,
        "cohesion": profile.cohesion,
        "purity": profile.purity if profile.label_names else None,
        "clusters": [
            {
                "size": int(profile.sizes[k]),
                "label": profile.labels[k] or None,
                "share": float(profile.shares[k]),
                "labels": dict(zip(profile.label_names, profile.label_counts[k].tolist(), strict=True)),
                "experts": profile.characteristic_experts(k),
            }
            for k in range(profile.clusters)
        ],
    }


def _show(profile: Profile, output: Path) -> None:
    table = Table("cluster", "requests", "labels", box=None, pad_edge=False)
    for column in (0, 1):
        table.columns[column].justify = "right"
    for k, size in enumerate(profile.sizes):
        table.add_row(str(k), str(size), printable(_mix(profile, k)))
    console = Console(highlight=False, markup=False)
    console.print(table)
    for line in _lines(profile):
        console.print(printable(line), soft_wrap=True)
    console.print(f"wrote {output}", soft_wrap=True)


def _mix(profile: Profile, cluster: int) -> str:
    """The cluster's most frequent labels and their shares."""
    counts = profile.label_counts[cluster]
    ordered = [m for m in (-counts).argsort(kind="stable") if counts[m]]
    size = int(profile.sizes[cluster])
    named = [f"{profile.label_names[m]} {counts[m] / size:.0%}" for m in ordered[:_MOST_NAMED]]
    more = [f"{len(ordered) - _MOST_NAMED} more"] if len(ordered) > _MOST_NAMED else []
    return ", ".join(named + more) or "-"


def _lines(profile: Profile) -> Iterator[str]:
    purity = f", purity {profile.purity:.2f}" if profile.label_names else ""
    yield f"{profile.model}, {profile.geometry}: cohesion {profile.cohesion:.3f}{purity}"
    within = profile.rho_within_labels
    yield f"rho {_interval(profile.rho)}" + (f"; within labels {_interval(within)}" if within else "")
    kept, total = len(profile.transform.layers), profile.geometry.layers
    choice = profile.layer_choice
    gain = (
        f" (rho of the choice {choice.rho_of_kept:.3f}, of all layers {_figure(choice.rho_of_all)})" if choice else ""
    )
    yield f"{profile.transform.kind} over {kept} of {total} layers{gain}"
    if profile.donor:
        yield f"clusters of {profile.donor.model}"


def _interval(rho: Rho | None) -> str:
    if rho is None:
        return "is not defined: the trace has no output counts, or no variation"
    return f"{rho.value:.3f} ({rho.low:.3f} to {rho.high:.3f}, {rho.pairs} pairs)"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
