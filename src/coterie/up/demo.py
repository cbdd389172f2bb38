"""The demo: one cluster of real engines, the same mixed requests under two policies, what differed.

calibrate: collect a trace from the prefill engine, fit one cluster per decode engine
serve:     in interleaved rounds, the same requests under each policy, each behind its own gateway
report:    latency, CPU time, where each domain went, whether outputs were equal
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np

from coterie.calibration.client import EngineClient
from coterie.calibration.collect import CollectOptions, Reporter, run_collect
from coterie.calibration.fit import fit
from coterie.calibration.prompts import Prompt, read_prompts
from coterie.calibration.sources.plugin import PluginSource
from coterie.errors import EngineError, InputError
from coterie.up.cluster import Cluster, Member
from coterie.up.demo_client import Served, serve_all
from coterie.up.processes import group_cpu_s

POLICIES = ("least_load", "locality")
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo does.

    Attributes:
        calibrate: prompt file for the trace.
        serve: prompt file for the requests; each prompt is used at most once per policy.
        requests: served under each policy.
        concurrency: requests in flight.
        max_tokens: output tokens of each request, in calibration too.
        seed: of the order of the requests and of the fit.
    """

    calibrate: Path
    serve: Path
    requests: int = 60
    concurrency: int = 16
    max_tokens: int = 48
    seed: int = 0


class DemoReporter(Reporter, Protocol):
    """Is told how the demo goes."""

    def step(self, title: str) -> None:
        """A new step begins."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What was measured under one policy.  Times are in milliseconds; None where every request failed.

    Attributes:
        policy: its name.
        requests: sent.
        errors: of them, failed.
        tpot_p50_ms: median time per output token.
        tpot_p99_ms: its 99th percentile.
        ttft_p50_ms: median time to first token.
        decode_cpu_ms_per_token: CPU time of the decode engines' processes per output token; NIXL's
            thread, which polls without pause, is part of it.
        worker_shares: share of the requests that each decode engine got.
        domain_shares: for each domain, the share of its requests on the engine that got most of them.
    """

    policy: str
    requests: int
    errors: int
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    ttft_p50_ms: float | None
    decode_cpu_ms_per_token: float | None
    worker_shares: dict[str, float]
    domain_shares: dict[str, float]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The demo's result.

    Attributes:
        policies: one report each.
        outputs_equal: prompts whose output tokens were the same under every policy.
        outputs_different: prompts whose output tokens were not; on a batching engine near-ties may flip.
        first_errors: messages of the first failed requests.
    """

    policies: tuple[PolicyReport, ...]
    outputs_equal: int
    outputs_different: int
    first_errors: tuple[str, ...]


@dataclass(slots=True)
class _Tally:
    """What is gathered of one policy over its rounds."""

    served: list[Served] = field(default_factory=list)
    workers: dict[str, str] = field(default_factory=dict)  # request id -> decode engine
    cpu_s: float = 0.0


def run_demo(cluster: Cluster, options: DemoOptions, reporter: DemoReporter) -> DemoReport:
    """Calibrate, serve, report, on a cluster that is up and runs no gateway.

    Raises:
        InputError: a prompt file or an option is not usable.
        EngineError: calibration failed, or a gateway did not start.
    """
    prompts = _choose(options)
    profile = _calibrate(cluster, options, reporter)
    reporter.step("starting gateways")
    keys = {"least_load": {}, "locality": {"profile": str(profile)}}
    gateways = {policy: _start_gateway(cluster, policy, keys[policy], options) for policy in POLICIES}
    tallies = {policy: _Tally() for policy in POLICIES}
    for number, part in enumerate(np.array_split(np.arange(len(prompts)), ROUNDS)):
        # the order alternates: the second to serve a prompt finds it in the engines' prefix caches
        for policy in POLICIES[:: -1 if number % 2 else 1]:
            reporter.step(f"round {number + 1}, {policy}")
            asked = [(f"{policy}-{i}", prompts[i]) for i in part]
            _serve_round(cluster, gateways[policy], asked, options, tallies[policy], reporter)
    return _report(tallies)


def _choose(options: DemoOptions) -> list[Prompt]:
    """The requests' prompts: a seeded shuffle of the file."""
    prompts = read_prompts(options.serve).prompts
    if not ROUNDS <= options.requests <= len(prompts):
        raise InputError(f"requests is {options.requests}; {options.serve} has prompts for {ROUNDS} to {len(prompts)}")
    order = np.random.default_rng(options.seed).permutation(len(prompts))
    return [prompts[i] for i in order[: options.requests]]


def _calibrate(cluster: Cluster, options: DemoOptions, reporter: DemoReporter) -> Path:
    """Collect a trace and fit a profile; returns its path."""
    reporter.step("collecting")
    folder = cluster.config.run_dir
    client = EngineClient(cluster.prefill_urls[0], notice=reporter.notice)
    source = PluginSource(client, cluster.config.served_model_name)
    collecting = CollectOptions(
        prompts=options.calibrate,
        output=folder / "demo.trace",
        max_tokens=options.max_tokens,
        concurrency=options.concurrency,
        force=True,
    )
    trace = asyncio.run(run_collect(source, collecting, reporter))
    reporter.step("fitting")
    fit(trace, len(cluster.decode_urls), seed=options.seed).save(folder / "demo.profile")
    return folder / "demo.profile"


def _start_gateway(cluster: Cluster, policy: str, keys: Mapping[str, Any], options: DemoOptions) -> Member:
    fixed = {"decode_policy": policy, "keep_decisions": options.requests, "seed": options.seed}
    return cluster.start_gateway({**fixed, **keys}, name=f"gateway-{policy}")


def _serve_round(
    cluster: Cluster,
    gateway: Member,
    asked: Sequence[tuple[str, Prompt]],
    options: DemoOptions,
    tally: _Tally,
    reporter: DemoReporter,
) -> None:
    reporter.begin(len(asked), 0)
    before_s = _decode_cpu_s(cluster)
    served = asyncio.run(
        serve_all(
            gateway.url,
            cluster.config.served_model_name,
            asked,
            max_tokens=options.max_tokens,
            concurrency=options.concurrency,
            advance=reporter.advance,
        )
    )
    tally.cpu_s += _decode_cpu_s(cluster) - before_s
    tally.served += served
    tally.workers |= _decisions(gateway)


def _decode_cpu_s(cluster: Cluster) -> float:
    return sum(group_cpu_s(member.process.pid) for member in cluster.members("decode") if member.process.pid)


def _decisions(gateway: Member) -> dict[str, str]:
    """Which decode engine each request went to, from the gateway's log of decisions."""
    reply = httpx.get(f"{gateway.admin_url}/decisions", timeout=10.0, trust_env=False)
    if reply.status_code != 200:
        raise EngineError(f"{gateway.admin_url}/decisions answered {reply.status_code}")
    return {entry["id"]: entry["decode"] for entry in reply.json()["decisions"]}


# --- what was measured -----------------------------------------------------------------------------------


def _report(tallies: Mapping[str, _Tally]) -> DemoReport:
    outputs: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    errors = []
    for tally in tallies.values():
        for served in tally.served:
            outputs[served.prompt.where].add(served.tokens)
            errors += [f"{served.id}: {served.error}"] if served.error else []
    equal = sum(len(tokens) == 1 for tokens in outputs.values())
    reports = tuple(_report_policy(policy, tally) for policy, tally in tallies.items())
    return DemoReport(reports, equal, len(outputs) - equal, tuple(errors[:3]))


def _report_policy(policy: str, tally: _Tally) -> PolicyReport:
    timelines = [served.timeline for served in tally.served if served.timeline]
    tokens = sum(timeline.output_tokens for timeline in timelines)
    tpots = [timeline.tpot_s for timeline in timelines if timeline.tpot_s is not None]
    return PolicyReport(
        policy=policy,
        requests=len(tally.served),
        errors=sum(served.error is not None for served in tally.served),
        tpot_p50_ms=_percentile_ms(tpots, 50),
        tpot_p99_ms=_percentile_ms(tpots, 99),
        ttft_p50_ms=_percentile_ms([timeline.ttft_s for timeline in timelines], 50),
        decode_cpu_ms_per_token=1000 * tally.cpu_s / tokens if tokens else None,
        worker_shares=_shares(Counter(tally.workers.values())),
        domain_shares=_domain_shares(tally),
    )


def _percentile_ms(seconds: Sequence[float], percent: int) -> float | None:
    return 1000 * float(np.percentile(seconds, percent)) if seconds else None


def _shares(counts: Counter[str]) -> dict[str, float]:
    return {name: count / counts.total() for name, count in sorted(counts.items())}


def _domain_shares(tally: _Tally) -> dict[str, float]:
    """Share of each domain's routed requests on the engine that got most of them."""
    engines: dict[str, Counter[str]] = defaultdict(Counter)
    for served in tally.served:
        if served.id in tally.workers:
            engines[served.prompt.label or "(none)"][tally.workers[served.id]] += 1
    return {label: max(_shares(counts).values()) for label, counts in sorted(engines.items())}
