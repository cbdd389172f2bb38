"""`coterie simulate`: policies compared on a simulated cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from coterie.activations import ActivationTrace
from coterie.calibration import Profile
from coterie.cli.show import show
from coterie.errors import ConfigError
from coterie.latency import QWEN3_30B_MI300X, StepTime, fit_step_time, mean_error, read_step_points
from coterie.report.tables import Table, number
from coterie.routing import DECODE_POLICIES, DEFAULT_TAU, PREFILL_POLICIES, make_policy
from coterie.sim import ClusterSpec, Population, Row, Stream, parse_topology, population_of
from coterie.sim import simulate as run

_PATH = click.Path(path_type=Path, dir_okay=False)
_WIDTH = 100
_COLUMNS = {
    "tpot_p50_ms": "TPOT P50",
    "tpot_p99_ms": "P99",
    "ttft_p50_ms": "TTFT P50",
    "active_experts_mean": "active experts",
    "batch_mean": "batch",
}


def _read_policies(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(value.split(","))
    for name in names:
        if name not in DECODE_POLICIES:
            raise click.BadParameter(f"{name!r} is none of {', '.join(DECODE_POLICIES)}")
    return names


@dataclass(frozen=True, slots=True)
class _Options:
    workload: Path
    topology: str
    rates: tuple[float, ...]
    policies: tuple[str, ...]
    prefill_policy: str
    profile: Path | None
    tau: float
    steps: Path | None
    output_tokens: int | None
    duration_s: float
    burstiness: float
    seed: int


@click.command()
@click.option("--workload", type=_PATH, required=True, metavar="TRACE", help="Trace of `coterie collect`.")
@click.option("--topology", required=True, metavar="8P16D", help="Prefill and decode workers.")
@click.option("--rate", "rates", type=float, required=True, multiple=True, help="Requests a second; repeat for more.")
@click.option(
    "--policies",
    callback=_read_policies,
    default="round_robin,least_load",
    show_default=True,
    help=f"Of {', '.join(DECODE_POLICIES)}.",
)
@click.option("--prefill-policy", type=click.Choice(PREFILL_POLICIES), default="prefix", show_default=True)
@click.option("--profile", type=_PATH, help="Profile for locality; as many clusters as decode workers.")
@click.option("--tau", type=float, default=DEFAULT_TAU, show_default=True, help="Width of the locality band.")
@click.option("--steps", type=_PATH, metavar="CSV", help="Measured decode steps of your engine, to take times from.")
@click.option("--output-tokens", type=click.IntRange(1), help="Of every request.  [default: as recorded]")
@click.option("--duration-s", type=float, default=120.0, show_default=True, help="For how long requests arrive.")
@click.option("--burstiness", type=float, default=1.0, show_default=True, help="1: Poisson; less: bursts.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same numbers.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def simulate(as_json: bool, **given: Any) -> None:
    """Compare decode policies on a simulated cluster, under the gateway's own routing code.

    Requests are those of TRACE, in random order; each uses the experts that were recorded of it.  Without --steps,
    decode steps take as long as those of Qwen3-30B-A3B on an MI300X, which is no figure for another model or machine.
    """
    options = _Options(**given)
    times = _step_time(options.steps)
    with _status() as tell:
        tell("reading the trace")
        trace = ActivationTrace.load(options.workload)
        profile = Profile.load(options.profile) if options.profile else None
        _check(options, trace, profile)
        topology = parse_topology(options.topology)
        spec = ClusterSpec(topology.prefill, topology.decode, topology.ranks, step_time=times)
        setting = _Setting(spec, trace, profile, options)
        population = population_of(trace, output_tokens=options.output_tokens)
        rows = []
        for rate in options.rates:
            for policy in options.policies:
                tell(f"{policy} at {rate:g} requests/s")
                rows.append(setting.run(population, policy, rate))
    if as_json:
        click.echo(msgspec.json.encode({"rows": rows}))
    else:
        show(*_report(options, trace, profile, rows), _WIDTH)


def _step_time(file: Path | None) -> StepTime:
    if file is None:
        return QWEN3_30B_MI300X
    points = read_step_points(file)
    times = fit_step_time(points)
    click.echo(
        f"step: {times.fixed_s * 1e3:.3g} ms + {times.per_request_s * 1e6:.3g} us x requests + "
        f"{times.per_expert_s * 1e6:.3g} us x active experts of all layers; "
        f"mean error {mean_error(times, points):.1%} over {len(points)} points",
        err=True,
    )
    return times


def _check(options: _Options, trace: ActivationTrace, profile: Profile | None) -> None:
    if "locality" in options.policies and profile is None:
        raise ConfigError("locality needs --profile; make one with `coterie fit`")
    if profile is not None and profile.geometry != trace.geometry:
        raise ConfigError(f"{options.profile} is of {profile.geometry}, {options.workload} of {trace.geometry}")


@dataclass(frozen=True, slots=True)
class _Setting:
    spec: ClusterSpec
    trace: ActivationTrace
    profile: Profile | None
    options: _Options

    def run(self, population: Population, policy: str, rate: float) -> Row:
        options = self.options
        decode = make_policy(
            policy, self.spec.targets("decode"), profile=self.profile, trace=self.trace, tau=options.tau
        )
        prefill = make_policy(options.prefill_policy, self.spec.targets("prefill"))
        traffic = Stream(rate, options.duration_s, options.burstiness)
        return run(population, traffic, self.spec, prefill=prefill, decode=decode, seed=options.seed)


def _report(
    options: _Options, trace: ActivationTrace, profile: Profile | None, rows: list[Row]
) -> tuple[list[str], list[Table]]:
    sentences = [f"{options.topology}, {trace.model} ({trace.geometry}), {len(trace)} recorded requests"]
    if trace.decode_ids is None:
        sentences.append("Active experts are expected values: the trace has no expert ids of output tokens.")
    if profile is not None and profile.trace_digest == trace.digest():
        sentences.append("The profile was fitted to these very requests: others would gain less.")
    if options.steps is None:
        sentences.append("Step times are those of Qwen3-30B-A3B on an MI300X; give --steps for yours.")
    cells = [
        (f"{row.rate:g}", row.policy, str(row.requests), str(row.failed), *(number(getattr(row, c)) for c in _COLUMNS))
        for row in rows
    ]
    columns = (">rate", "policy", ">requests", ">failed", *(f">{title}" for title in _COLUMNS.values()))
    note = "Times in ms.  Active experts: different ones of a layer in a decode step, on average."
    return sentences, [Table("Policies", columns, tuple(cells), note)]


@contextmanager
def _status() -> Iterator[Any]:
    """What is done at present, on stderr if that is a terminal."""
    with Console(stderr=True).status("") as status:
        yield status.update
