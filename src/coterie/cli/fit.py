"""`coterie fit`: a routing profile from a recorded trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from coterie.activations import ActivationTrace
from coterie.calibration import Profile
from coterie.calibration import fit as fit_profile
from coterie.errors import ConfigError

_PATH = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("trace", type=_PATH)
@click.option("--clusters", type=click.IntRange(min=1), required=True, help="Number of decode groups.")
@click.option("--output", type=_PATH, required=True, help="Profile to write.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same bytes.")
@click.option("--starts", type=click.IntRange(min=1), default=5, show_default=True, help="Seedings to try.")
@click.option("--force", is_flag=True, help="Overwrite an existing profile.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
def fit(trace: Path, clusters: int, output: Path, seed: int, starts: int, force: bool, as_json: bool) -> None:
    """Fit a routing profile from TRACE, a file written by `coterie collect`."""
    if output.exists() and not force:
        raise ConfigError(f"{output} exists; give another --output, or --force to overwrite it")
    profile = fit_profile(ActivationTrace.load(trace), clusters, seed=seed, starts=starts)
    profile.save(output)
    if as_json:
        click.echo(msgspec.json.encode(_report(profile, output)))
    else:
        _show(profile, output)


def _report(profile: Profile, output: Path) -> dict[str, Any]:
    rows = zip(profile.sizes.tolist(), profile.labels, profile.shares.tolist(), strict=True)
    return {
        "profile": str(output),
        "model": profile.model,
        "geometry": profile.geometry,
        "trace_digest": profile.trace_digest,
        "seed": profile.seed,
        "cohesion": profile.cohesion,
        "purity": profile.purity if any(profile.labels) else None,
        "clusters": [{"size": size, "label": label or None, "share": share} for size, label, share in rows],
    }


def _show(profile: Profile, output: Path) -> None:
    table = Table("cluster", "requests", "most frequent label", "its share", box=None, pad_edge=False)
    for column in (0, 1, 3):
        table.columns[column].justify = "right"
    for k, (size, label, share) in enumerate(zip(profile.sizes, profile.labels, profile.shares, strict=True)):
        table.add_row(str(k), str(size), label or "-", f"{share:.0%}" if label else "-")
    console = Console(highlight=False, markup=False)
    console.print(table)
    purity = f", purity {profile.purity:.2f}" if any(profile.labels) else ""
    console.print(f"{profile.model}, {profile.geometry}: cohesion {profile.cohesion:.3f}{purity}")
    console.print(f"wrote {output}", soft_wrap=True)
