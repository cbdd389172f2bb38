"""`coterie inspect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from coterie.activations import ActivationTrace
from coterie.analysis import inspect_profile, inspect_trace
from coterie.analysis.inspection import DEFAULT_CLUSTERS
from coterie.calibration import Profile
from coterie.cli.show import show
from coterie.errors import ConfigError
from coterie.files import check_target
from coterie.report import profile as of_profile
from coterie.report import svg
from coterie.report import trace as of_trace
from coterie.report.page import write
from coterie.report.tables import Table
from coterie.tensorfile import format_of

_PATH = click.Path(path_type=Path, dir_okay=False)
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class _Report:
    value: object
    answer: Sequence[str]
    tables: Sequence[Table]
    page: Callable[[], str]


@click.command()
@click.argument("file", type=_PATH)
@click.option("--profile", type=_PATH, help="Profile to judge on the trace.")
@click.option("--clusters", type=click.IntRange(1), help=f"Clusters to fit without one.  [default: {DEFAULT_CLUSTERS}]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same numbers.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--html", type=_PATH, metavar="OUT.html", help="Write a page to open in a browser; needs matplotlib.")
def inspect(
    file: Path, profile: Path | None, clusters: int | None, seed: int, as_json: bool, html: Path | None
) -> None:
    """Say whether routing by locality is worth it, and why.

    FILE is a trace of `coterie collect`, or a profile of `coterie fit`, which tells less by itself.

    Clusters are judged on requests that they were not fitted to: on the other half of the trace, or on all of it
    where --profile was fitted to another trace.
    """
    if html:
        svg.check()
        check_target(html, [path for path in (file, profile) if path])
    if format_of(file) == "profile":
        if profile or clusters:
            raise ConfigError(f"{file} is a profile; --profile and --clusters go with a trace")
        report = _of_profile(file)
    else:
        report = _of_trace(file, profile, clusters, seed)
    if html:
        write(html, report.page())
    if as_json:
        click.echo(msgspec.json.encode(report.value, enc_hook=_plain))
        return
    show(report.answer, report.tables, _WIDTH)
    if html:
        click.echo(f"\nwrote {html}")


def _of_profile(file: Path) -> _Report:
    found = inspect_profile(Profile.load(file))
    return _Report(found, [of_profile.ANSWER], of_profile.tables(found), lambda: of_profile.page(found))


def _of_trace(file: Path, profile: Path | None, clusters: int | None, seed: int) -> _Report:
    with _progress() as tell:
        tell("reading the trace")
        trace = ActivationTrace.load(file)
        chosen = Profile.load(profile) if profile else None
        found = inspect_trace(trace, profile=chosen, clusters=clusters, seed=seed, progress=tell)
    verdict = found.verdict
    answer = [verdict.headline, *verdict.because, f"What next: {verdict.advice}", *of_trace.PROOF]
    return _Report(found, answer, of_trace.tables(found), lambda: of_trace.page(found))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is done, and for how long, on stderr."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)


def _plain(value: object) -> Any:
    """Arrays as lists and numpy's numbers as Python's; msgspec writes NaN as null."""
    assert isinstance(value, np.ndarray | np.generic)
    return value.tolist()
