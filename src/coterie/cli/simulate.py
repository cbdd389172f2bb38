"""`coterie simulate`: policies compared on a simulated cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from click.core import ParameterSource

from coterie.cli.show import show, working
from coterie.cli.simulated import Simulated, page, sentences, tables
from coterie.cli.workloads import Source, made, made_names, model_names, recorded
from coterie.errors import ConfigError
from coterie.files import check_target
from coterie.placement import Placement
from coterie.report import svg
from coterie.report.page import write
from coterie.routing import DECODE_POLICIES, DEFAULT_TAU, DEFAULT_WINDOW_S, PREFILL_POLICIES, Policy, make_policy
from coterie.sim import Change, ClusterSpec, Drift, Mix, Stream, Traffic, parse_topology, read_arrivals
from coterie.sim import simulate as run
from coterie.sim.cluster import Cluster
from coterie.sim.placement import placements_of
from coterie.sim.spec import Topology
from coterie.sim.timeline import events_of

_PATH = click.Path(path_type=Path, dir_okay=False)
_WIDTH = 100

_T = TypeVar("_T")


def _read_policies(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(value.split(","))
    for name in names:
        if name not in DECODE_POLICIES:
            raise click.BadParameter(f"{name!r} is none of {', '.join(DECODE_POLICIES)}")
    return _each_once(names)


def _read_rates(ctx: click.Context, param: click.Parameter, value: tuple[float, ...]) -> tuple[float, ...]:
    return _each_once(value)


def _read_sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        return tuple(map(int, value.split(","))) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} is not like 1,2,4,8") from None


def _each_once(values: tuple[_T, ...]) -> tuple[_T, ...]:
    """Runs of one policy at one rate are told apart by their seeds alone: one that came again would pass for a seed."""
    for value, times in Counter(values).items():
        if times > 1:
            raise click.BadParameter(f"{value} is named {times} times; name each once")
    return values


def _read_mix(ctx: click.Context, param: click.Parameter, value: str | None) -> Mix | None:
    return None if value is None else _mix_of(value)


def _read_drifts(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> tuple[tuple[float, Mix], ...]:
    found = []
    for text in value:
        seconds, colon, mix = text.partition(":")
        if not colon:
            raise click.BadParameter(f"{text!r} is not like 60:en=0.2,zh=0.8")
        found.append((_seconds_of(seconds), _mix_of(mix)))
    return tuple(found)


def _read_moments(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> tuple[tuple[str, float], ...]:
    found = []
    for text in value:
        name, at, seconds = text.rpartition("@")
        if not at:
            raise click.BadParameter(f"{text!r} is not like decode-3@60")
        found.append((name, _seconds_of(seconds)))
    return tuple(found)


def _mix_of(text: str) -> Mix:
    weights = []
    for part in text.split(","):
        name, sign, weight = part.rpartition("=")
        if not sign:
            raise click.BadParameter(f"{part!r} is not like en=0.8")
        weights.append((name, _number_of(weight)))
    return Mix(tuple(weights))


def _seconds_of(text: str) -> float:
    seconds = _number_of(text)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise click.BadParameter(f"{text!r} is no time from 0 s on")
    return seconds


def _number_of(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number") from None


@dataclass(frozen=True, slots=True)
class _Options:
    workload: str
    model: str | None
    topology: str
    rates: tuple[float, ...]
    arrivals: Path | None
    policies: tuple[str, ...]
    prefill_policy: str
    profile: Path | None
    tau: float
    refit_window_s: float
    steps: Path | None
    output_tokens: int | None
    duration_s: float
    burstiness: float
    warm_up_s: float
    mix: Mix | None
    drifts: tuple[tuple[float, Mix], ...]
    losses: tuple[tuple[str, float], ...]
    joins: tuple[tuple[str, float], ...]
    expert_ranks: int | None
    placement: str
    graph_sizes: tuple[int, ...]
    kv_tokens: int | None
    prefill_first: bool
    seed: int
    seeds: int


@click.command()
@click.option(
    "--workload",
    required=True,
    metavar="TRACE",
    help=f"A file of `coterie collect`; or {' or '.join(made_names())}, whose requests are made up.",
)
@click.option("--model", type=click.Choice(model_names()), help="Of a made-up workload.")
@click.option(
    "--topology", required=True, metavar="8P16D", help="Prefill and decode workers; 2P4Dx8: groups of 8 ranks."
)
@click.option(
    "--rate",
    "rates",
    callback=_read_rates,
    type=float,
    multiple=True,
    help="Requests a second; repeat for more.",
)
@click.option(
    "--arrivals", type=_PATH, help="Instead of --rate: a file with a time of arrival in seconds on each line."
)
@click.option(
    "--policies",
    callback=_read_policies,
    default="round_robin,least_load,marginal",
    show_default=True,
    help=f"Of {', '.join(DECODE_POLICIES)}.",
)
@click.option("--prefill-policy", type=click.Choice(PREFILL_POLICIES), default="prefix", show_default=True)
@click.option("--profile", type=_PATH, help="Profile for locality; as many clusters as decode workers.")
@click.option("--tau", type=float, default=DEFAULT_TAU, show_default=True, help="Width of the locality band.")
@click.option(
    "--refit-window-s",
    type=float,
    default=DEFAULT_WINDOW_S,
    show_default=True,
    help="How far back requests are that locality_refit and locality_adaptive refit to.",
)
@click.option("--steps", type=_PATH, metavar="CSV", help="Measured decode steps of your engine, to take times from.")
@click.option("--output-tokens", type=click.IntRange(1), help="Of every request.  [default: as recorded]")
@click.option("--duration-s", type=float, default=120.0, show_default=True, help="For how long requests arrive.")
@click.option("--burstiness", type=float, default=1.0, show_default=True, help="1: Poisson; less: bursts.")
@click.option("--warm-up-s", type=float, default=0.0, show_default=True, help="What arrives before is in no figure.")
@click.option("--mix", callback=_read_mix, metavar="EN=8,ZH=2", help="Weights of the domains.  [default: as recorded]")
@click.option(
    "--drift", "drifts", callback=_read_drifts, multiple=True, metavar="60:EN=2,ZH=8", help="The mix from a time on."
)
@click.option(
    "--lose",
    "losses",
    callback=_read_moments,
    multiple=True,
    metavar="NAME@S",
    help="A worker is lost, as decode-3@60.",
)
@click.option(
    "--join", "joins", callback=_read_moments, multiple=True, metavar="NAME@S", help="A worker comes, as decode-16@90."
)
@click.option(
    "--expert-ranks", type=click.IntRange(1), help="Over which each decode worker or group spreads its experts."
)
@click.option(
    "--placement",
    type=click.Choice(("contiguous", "balanced")),
    default="contiguous",
    show_default=True,
    help="Of experts on ranks; balanced: for each group's own requests, by the profile.",
)
@click.option(
    "--graph-sizes", callback=_read_sizes, metavar="1,2,4,8", help="Batch sizes for which engines captured CUDA graphs."
)
@click.option("--kv-tokens", type=click.IntRange(1), help="Tokens of KV on each decode worker.  [default: unlimited]")
@click.option("--prefill-first", is_flag=True, help="Clients get their first token from the prefill worker.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same numbers.")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Runs with seeds from --seed on.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.option("--html", type=_PATH, metavar="OUT.html", help="Write a page to open in a browser; needs matplotlib.")
def simulate(as_json: bool, html: Path | None, **given: Any) -> None:
    """Compare decode policies on a simulated cluster, under the gateway's own routing code.

    Requests are those of a trace, in random order; each uses the experts that were recorded of it.  Without --steps,
    decode steps take as long as those of Qwen3-30B-A3B on an MI300X, which is no figure for another model or machine.
    Or requests, experts and step times are made up to fit published statistics.
    """
    options = _Options(**given)
    if html:
        svg.check()
        check_target(
            html, [path for path in (Path(options.workload), options.profile, options.steps, options.arrivals) if path]
        )
    with working("reading the workload") as tell:
        found = _Setting.of(options).run_all(tell)
    if html:
        write(html, page(found))
    if as_json:
        click.echo(msgspec.json.encode(found.document()))
        return
    show(sentences(found), tables(found), _WIDTH)
    if html:
        click.echo(f"\nwrote {html}")


@dataclass(frozen=True, slots=True)
class _Setting:
    traffic: tuple[Traffic, ...]
    spec: ClusterSpec
    changes: tuple[Change, ...]
    drift: Drift | None
    source: Source
    options: _Options

    @classmethod
    def of(cls, options: _Options) -> _Setting:
        """Read what the options name, and check that it goes together: no run is made before all can be."""
        traffic = _traffic(options)
        topology = parse_topology(options.topology)
        changes = _changes(options, topology)
        groups = max([topology.decode, *(1 + _group_of(name) for name, _ in options.joins)])
        drift = _drift(options)
        source = _source(options, groups)
        spec = ClusterSpec(
            topology.prefill,
            groups,
            topology.ranks,
            options.expert_ranks,
            step_time=source.step_time,
            graph_sizes=options.graph_sizes,
            kv_tokens=options.kv_tokens,
            prefill_first=options.prefill_first,
            absent=_absent(changes),
        )
        if options.placement == "balanced":
            spec = replace(spec, placements=_placements(source, spec))
        for policy in options.policies:
            _decode(policy, source, spec, options)
        return cls(traffic, spec, changes, drift, source, options)

    def run_all(self, tell: Callable[[str], object]) -> Simulated:
        """Every policy at every rate with every seed."""
        options = self.options
        warm_up = f"What arrived in the first {options.warm_up_s:g} s is in no figure."
        notes = (*self.source.notes, warm_up) if options.warm_up_s else self.source.notes
        title = f"{options.topology}, {self.source.title}"
        found = Simulated(title, notes, events_of(self.changes, self.drift))
        for traffic in self.traffic:
            for policy in options.policies:
                for seed in range(options.seed, options.seed + options.seeds):
                    tell(f"{policy} at {traffic.rate_per_s:g} requests/s, seed {seed}")
                    self._run(policy, traffic, seed, found)
        return found

    def _run(self, policy: str, traffic: Traffic, seed: int, found: Simulated) -> None:
        options, clusters = self.options, list[Cluster]()
        row = run(
            self.source.population,
            traffic,
            self.spec,
            prefill=make_policy(options.prefill_policy, self.spec.targets("prefill")),
            decode=_decode(policy, self.source, self.spec, options),
            seed=seed,
            drift=self.drift,
            changes=self.changes,
            warm_up_s=options.warm_up_s,
            on_end=clusters.append,
        )
        found.add(row, clusters[0])


def _traffic(options: _Options) -> tuple[Traffic, ...]:
    if bool(options.rates) == (options.arrivals is not None):
        raise ConfigError("give either --rate or --arrivals, by which requests come")
    if options.arrivals is None:
        return tuple(Stream(rate, options.duration_s, options.burstiness) for rate in options.rates)
    source = click.get_current_context().get_parameter_source
    for name in ("duration_s", "burstiness"):
        if source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name.replace('_', '-')} goes with --rate; --arrivals has its own times")
    return (read_arrivals(options.arrivals),)


def _decode(name: str, source: Source, spec: ClusterSpec, options: _Options) -> Policy:
    """A new one for each run, since some keep state."""
    return make_policy(
        name,
        spec.targets("decode"),
        profile=source.profile,
        trace=source.trace,
        tau=options.tau,
        refit_window_s=options.refit_window_s,
    )


def _placements(source: Source, spec: ClusterSpec) -> tuple[Placement, ...]:
    assert source.profile is not None, "a balanced placement asked for one"
    if source.profile.clusters != spec.decode:
        raise ConfigError(f"--placement: the profile has {source.profile.clusters} clusters for {spec.decode} groups")
    return placements_of(source.profile, source.trace, spec.holders)


def _source(options: _Options, groups: int) -> Source:
    wanting = [policy for policy in options.policies if policy.startswith("locality")]
    if options.placement == "balanced":
        wanting.append("--placement balanced")
    if options.workload in made_names():
        given = bool(options.profile or options.steps)
        clusters = groups if wanting else None
        return made(options.workload, options.model, clusters, options.seed, options.output_tokens, given=given)
    if wanting and options.profile is None:
        raise ConfigError(f"{wanting[0]} needs --profile; make one with `coterie fit`")
    return recorded(Path(options.workload), options.profile, options.steps, options.output_tokens, model=options.model)


def _changes(options: _Options, topology: Topology) -> tuple[Change, ...]:
    changes = [
        *(Change(time_s, name, "lost") for name, time_s in options.losses),
        *(Change(time_s, name, "joined") for name, time_s in options.joins),
    ]
    joining = {_group_of(name) for name, _ in options.joins}
    for new in range(topology.decode, max(joining, default=-1)):
        if new not in joining:
            raise ConfigError(f"--join: decode-{new} has to join too, since workers are numbered without gaps")
    return tuple(sorted(changes, key=lambda change: change.time_s))


def _absent(changes: Sequence[Change]) -> frozenset[str]:
    """Workers whose first change is that they join: until then they are not there."""
    first: dict[str, Change] = {}
    for change in changes:
        first.setdefault(change.worker, change)
    return frozenset(name for name, change in first.items() if change.kind == "joined")


def _group_of(name: str) -> int:
    """Number of a decode group; -1 for another name, which the cluster refuses where it has no such worker."""
    number = name.removeprefix("decode-").partition(".")[0]
    return int(number) if name.startswith("decode-") and number.isdecimal() and len(number) <= 4 else -1


def _drift(options: _Options) -> Drift | None:
    if options.mix is not None:
        return Drift(((0.0, options.mix), *sorted(options.drifts, key=lambda one: one[0])))
    if options.drifts:
        raise ConfigError("--drift changes the mix; say by --mix what it is before")
    return None
