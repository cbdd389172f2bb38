"""Calibrate, start a gateway for each policy, serve the schedule."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

import httpx

from coterie.activations import ActivationTrace
from coterie.calibration import Profile, fit
from coterie.calibration.client import EngineClient
from coterie.calibration.collect import CollectOptions, Reporter, run_collect
from coterie.calibration.sources.plugin import PluginSource
from coterie.errors import EngineError
from coterie.up.cluster import Cluster, Member
from coterie.up.demo.client import Served, serve_all
from coterie.up.demo.counters import Counters, Sample, Watch
from coterie.up.demo.results import DemoResult, PassResult, Routed, sum_up
from coterie.up.demo.schedule import DemoOptions, Pass, Schedule, request_id
from coterie.up.priority import polling_cpu_s
from coterie.up.processes import group_cpu_s

_TIMEOUT = httpx.Timeout(30.0)
_FULL = 2 / 3  # of an engine's share of the requests in flight


class DemoReporter(Reporter, Protocol):
    """Is told how the demo goes."""

    def step(self, title: str) -> None:
        """A new step begins."""
        ...

    def detail(self, text: str) -> None:
        """What of the step is done now."""
        ...


def run_demo(cluster: Cluster, options: DemoOptions, schedule: Schedule, reporter: DemoReporter) -> DemoResult:
    """Calibrate, serve, sum up, on a cluster that is up and runs no gateway.

    Raises:
        InputError: the prompt file for the trace is not usable.
        EngineError: calibration failed, a gateway did not start, or an engine is gone.
    """
    trace, profile = _calibrate(cluster, options, reporter)
    gateways = _start_gateways(cluster, options, reporter)
    _warm_up(cluster, options, schedule, reporter)
    reporter.step("serving")
    reporter.begin(sum(len(one.prompts) for one in schedule), 0)
    passes = [_serve(cluster, gateways[one.policy], one, options, reporter) for one in schedule]
    return sum_up(cluster.config.served_model_name, cluster.config.engine, passes, trace, profile)


# --- before requests are measured ------------------------------------------------------------------------


def _calibrate(cluster: Cluster, options: DemoOptions, reporter: DemoReporter) -> tuple[ActivationTrace, Profile]:
    """Collect a trace from a prefill engine and fit one cluster for each decode engine; both are written."""
    reporter.step("collecting")
    client = EngineClient(cluster.prefill_urls[0], notice=reporter.notice)
    source = PluginSource(client, cluster.config.served_model_name)
    collecting = CollectOptions(
        prompts=options.calibrate,
        output=_trace_file(cluster),
        max_tokens=options.max_tokens,
        concurrency=options.concurrency,
        force=True,
    )
    trace = asyncio.run(run_collect(source, collecting, reporter))
    reporter.step("fitting")
    profile = fit(trace, len(cluster.decode_urls), seed=options.seed)
    profile.save(_profile_file(cluster))
    return trace, profile


def _trace_file(cluster: Cluster) -> Path:
    return cluster.config.run_dir / "demo.trace"


def _profile_file(cluster: Cluster) -> Path:
    return cluster.config.run_dir / "demo.profile"


def _start_gateways(cluster: Cluster, options: DemoOptions, reporter: DemoReporter) -> dict[str, Member]:
    """One for each policy, since a gateway has one policy for life."""
    reporter.step("starting gateways")
    reporter.begin(len(options.policies), 0)
    gateways = {}
    for policy in options.policies:
        keys = gateway_keys(policy, options, trace=_trace_file(cluster), profile=_profile_file(cluster))
        gateways[policy] = cluster.start_gateway(keys, name=f"gateway-{policy}")
        reporter.advance()
    return gateways


def gateway_keys(policy: str, options: DemoOptions, *, trace: Path, profile: Path) -> dict[str, Any]:
    """Configuration of the gateway of a policy, with the trace or the profile if it needs one."""
    keys = {"decode_policy": policy, "keep_decisions": options.requests, "seed": options.seed}
    if policy == "domain":
        return {**keys, "trace": str(trace)}
    return {**keys, "profile": str(profile)} if policy.startswith("locality") else keys


def _warm_up(cluster: Cluster, options: DemoOptions, schedule: Schedule, reporter: DemoReporter) -> None:
    """Have each prefill engine see each prompt once, so that every policy finds the same prefix caches."""
    prompts = list({prompt.where: prompt for one in schedule for prompt in one.prompts}.values())
    reporter.step("warming up prefill")
    reporter.begin(len(prompts) * len(cluster.prefill_urls), 0)
    asked = [(f"warm-{i}", prompt) for i, prompt in enumerate(prompts)]
    for url in cluster.prefill_urls:
        served = asyncio.run(
            serve_all(
                url,
                cluster.config.served_model_name,
                asked,
                max_tokens=1,
                concurrency=options.concurrency,
                advance=reporter.advance,
            )
        )
        for one in served:
            if one.error:
                raise EngineError(f"{one.prompt.where}: {url} could not prefill it: {one.error}")


# --- one pass --------------------------------------------------------------------------------------------


def _serve(
    cluster: Cluster, gateway: Member, planned: Pass, options: DemoOptions, reporter: DemoReporter
) -> PassResult:
    cluster.check()
    reporter.detail(planned.name)
    before_s = _decode_cpu_s(cluster)
    served, counted, samples = asyncio.run(_send(cluster, gateway, planned, options, reporter))
    cpu_s = _decode_cpu_s(cluster) - before_s
    full_live = _FULL * min(options.concurrency, len(planned.prompts)) / len(cluster.decode_urls)
    return PassResult(planned, served, _routed(gateway, planned), cpu_s, counted, samples, full_live)


async def _send(
    cluster: Cluster, gateway: Member, planned: Pass, options: DemoOptions, reporter: DemoReporter
) -> tuple[tuple[Served, ...], Counters | None, tuple[Sample, ...]]:
    """Send the requests of a pass; returns what became of them, and what the decode engines counted meanwhile."""
    asked = [(request_id(planned, i), prompt) for i, prompt in enumerate(planned.prompts)]
    async with httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False) as client:
        watch = Watch(client, cluster.decode_urls)
        before = await watch.read()
        async with watch.sampling() as samples:
            served = await serve_all(
                gateway.url,
                cluster.config.served_model_name,
                asked,
                max_tokens=options.max_tokens,
                concurrency=options.concurrency,
                advance=reporter.advance,
            )
        after = await watch.read()
    return tuple(served), after - before if after and before else None, tuple(samples)


def _decode_cpu_s(cluster: Cluster) -> float:
    """Without threads that poll without pause (NIXL's): how much they get says what else ran, not what was done."""
    groups = [member.process.pid for member in cluster.members("decode") if member.process.pid]
    return sum(group_cpu_s(group) - polling_cpu_s(group) for group in groups)


def _routed(gateway: Member, planned: Pass) -> dict[str, Routed]:
    """Where the requests of a pass went, from the gateway's log of decisions."""
    reply = httpx.get(f"{gateway.admin_url}/decisions", timeout=_TIMEOUT, trust_env=False)
    if reply.status_code != 200:
        raise EngineError(f"{gateway.admin_url}/decisions answered {reply.status_code}")
    ids = {request_id(planned, i) for i in range(len(planned.prompts))}
    return {
        entry["id"]: Routed(entry["decode"], len(entry["candidates"]))
        for entry in reply.json()["decisions"]
        if entry["id"] in ids
    }
