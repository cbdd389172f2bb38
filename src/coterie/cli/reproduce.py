"""`coterie reproduce`: the paper's figures, simulated."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from coterie.cli.show import show, working
from coterie.files import check_target
from coterie.report import svg
from coterie.report.page import write
from coterie.reproduce.cells import Plan
from coterie.reproduce.figures import FIGURES, Bench, Outcome
from coterie.reproduce.shown import page, table

_WIDTH = 150


def _list(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        for name, make in FIGURES.items():
            click.echo(f"{name:14}{(make.__doc__ or '').splitlines()[0]}")
        ctx.exit()


@click.command()
@click.argument("figures", metavar="FIGURE...", nargs=-1, required=True, type=click.Choice([*FIGURES, "all"]))
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="Say what figures there are."
)
@click.option("--measured-s", type=float, default=120.0, show_default=True, help="For how long requests count.")
@click.option("--warm-up-s", type=float, default=30.0, show_default=True, help="For how long they arrive before.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same numbers.")
@click.option("--json", "as_json", is_flag=True, help="Print the values as JSON.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="OUT.html",
    help="Write a page to open in a browser; needs matplotlib.",
)
def reproduce(
    figures: tuple[str, ...], measured_s: float, warm_up_s: float, seed: int, as_json: bool, html: Path | None
) -> None:
    """Simulate the figures of ELDR's paper and artifact, and set them beside what was published.

    Requests are made up and step times fitted, to published statistics that are marked so; everything else is a
    prediction.  FIGURE is a name that --list gives, or `all`.
    """
    if html:
        svg.check()
        check_target(html)
    plan = Plan(measured_s, warm_up_s, seed)
    outcomes = _outcomes(list(FIGURES) if "all" in figures else figures, plan)
    if html:
        write(html, page(outcomes, f"{measured_s:g} s of traffic after {warm_up_s:g} s of warm-up, seed {seed}"))
    if as_json:
        click.echo(msgspec.json.encode({"figures": outcomes}))
        return
    for outcome in outcomes:
        show(outcome.findings, [table(outcome)], _WIDTH)
    if html:
        click.echo(f"\nwrote {html}")


def _outcomes(names: tuple[str, ...] | list[str], plan: Plan) -> list[Outcome]:
    with working("reading what was published") as tell:
        bench = Bench(plan, tell)
        return [FIGURES[name](bench) for name in dict.fromkeys(names)]
