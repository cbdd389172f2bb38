"""Who is there, and does it fit: what is checked before the first client is served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from coterie.calibration import Profile
from coterie.core import ModelGeometry
from coterie.errors import EngineError, ProfileError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.fleet.probe import ProbeError, Prober
from coterie.gateway.fleet.readings import require_readings
from coterie.gateway.fleet.workers import Worker, states_of
from coterie.gateway.gateway import Gateway
from coterie.gateway.inputs import Inputs
from coterie.routing import LeastLoad, Locality, LocalityRefit, Policy, Reads, make_policy

_POLL_S = 0.5
_log = logging.getLogger("coterie.gateway")


async def start_up(gateway: Gateway, inputs: Inputs) -> None:
    """Make the policies, wait for the workers, connect each prefill with each decode worker.

    Raises:
        EngineError: no worker of a role came up in time, or one is not set up for disaggregation.
        ProfileError: the profile does not fit the workers, and `on_mismatch` is "error".
        ConfigError: a policy is unknown or lacks what it needs.
    """
    prefill, decode, config, prober = gateway.prefill, gateway.decode, gateway.config, gateway.prober
    prefill.policy = prefill_policy(config, prefill.targets)
    decode.policy = policy = decode_policy(config, inputs, decode.targets)
    await _wait_for_workers(gateway, prober)
    for worker in prefill.available():
        prefill.set_problem(worker, "unhealthy", "not yet probed")
        await _admit_prefill(gateway, prober, worker)
    _require_each_role(gateway)
    if config.reads_workers:
        await require_readings(gateway)
    decode.policy = fitting_policy(config, inputs, policy, gateway.workers, prober)
    for worker in gateway.workers:
        if worker.problem is not None:
            _log.warning("%s worker %s (%s) is not available: %s", worker.role, worker.name, worker.url, worker.problem)


async def _wait_for_workers(gateway: Gateway, prober: Prober) -> None:
    """Check all workers until one of each role is well; those that are not by then may join later."""
    loop = asyncio.get_running_loop()
    end_s, told = loop.time() + gateway.config.startup_timeout_s, False
    while True:
        waiting = [worker for worker in gateway.workers if worker.problem is not None]
        await asyncio.gather(*(_check(gateway, prober, worker) for worker in waiting))
        if gateway.ready:
            return
        if loop.time() > end_s:
            _require_each_role(gateway)
        missing = "; ".join(str(worker.problem) for worker in gateway.workers if worker.problem is not None)
        _log.log(logging.DEBUG if told else logging.INFO, "waiting for workers: %s", missing)
        told = True
        await asyncio.sleep(_POLL_S)


async def _check(gateway: Gateway, prober: Prober, worker: Worker) -> None:
    try:
        await prober.check(worker)
    except EngineError as error:
        gateway.fleet_of(worker).set_problem(worker, "unhealthy", str(error))
    else:
        gateway.fleet_of(worker).set_problem(worker, "unhealthy", None)


async def _admit_prefill(gateway: Gateway, prober: Prober, worker: Worker) -> None:
    try:
        await prober.admit(worker, gateway.decode.available())
    except ProbeError as error:
        if error.answered:
            raise
        gateway.prefill.set_problem(worker, "unhealthy", str(error))
    else:
        gateway.prefill.set_problem(worker, "unhealthy", None)


def _require_each_role(gateway: Gateway) -> None:
    for fleet in (gateway.prefill, gateway.decode):
        if not fleet.available():
            lines = [f"\n  {worker.name} ({worker.url}): {worker.problem}" for worker in fleet.workers.values()]
            raise EngineError(
                f"no {fleet.role} worker is available:{''.join(lines)}\n"
                "start the servers, correct their URLs, or allow more time with --startup-timeout-s"
            )


def _geometries(workers: Sequence[Worker], prober: Prober) -> Iterator[tuple[str, ModelGeometry | str]]:
    """What probes showed of each prefill worker that was probed."""
    for worker in workers:
        if worker.role == "prefill" and worker.name in prober.geometries:
            yield worker.name, prober.geometries[worker.name]


def _tell_of_missing_counts(workers: Sequence[Worker], prober: Prober) -> None:
    for name, geometry in _geometries(workers, prober):
        if not isinstance(geometry, ModelGeometry):
            _log.warning(
                "prefill worker %s: %s; its requests are routed by load only: start it with coterie's CountsConnector",
                name,
                geometry,
            )


def prefill_policy(config: GatewayConfig, workers: Sequence[Worker]) -> Policy:
    """How to choose among prefill workers.

    Raises:
        ConfigError: the policy is unknown.
    """
    return make_policy(config.prefill_policy, states_of(workers))


def decode_policy(config: GatewayConfig, inputs: Inputs, workers: Sequence[Worker]) -> Policy:
    """How to choose among decode workers, as far as the configuration tells; it may take a while.

    Raises:
        ConfigError: the policy is unknown or lacks what it needs.
        ProfileError: the profile does not fit the number of workers, and `on_mismatch` is "error".
    """
    return make_policy(
        config.resolved_decode_policy,
        states_of(workers),
        profile=inputs.profile,
        trace=inputs.trace,
        tau=config.tau,
        on_mismatch=config.on_mismatch,
        refit_window_s=config.refit_window_s,
    )


def fitting_policy(
    config: GatewayConfig, inputs: Inputs, policy: Policy, workers: Sequence[Worker], prober: Prober
) -> Policy:
    """The policy, if the profile fits what the workers showed; else load only, where that is allowed.

    Raises:
        ProfileError: it does not fit, and `on_mismatch` is "error".
    """
    if inputs.profile is None or not isinstance(policy, (Locality, LocalityRefit)):
        if Reads.COUNTS in policy.reads:
            _tell_of_missing_counts(workers, prober)
        return policy
    problem = _misfit(inputs.profile, workers, prober)
    if problem is None:
        return policy
    if config.on_mismatch == "error":
        raise ProfileError(f"{problem}, or route by load alone with --on-mismatch load")
    _log.warning("%s; routing by load only", problem)
    return LeastLoad("load only: profile mismatch", problem)


def _misfit(profile: Profile, workers: Sequence[Worker], prober: Prober) -> str | None:
    for worker in workers:
        models = prober.models.get(worker.name)
        if models is not None and profile.model not in models:
            return (
                f"the profile is of model {profile.model!r}, {worker.role} worker {worker.name} serves "
                f"{', '.join(map(repr, models))}; use the profile of that model"
            )
    for name, geometry in _geometries(workers, prober):
        if not isinstance(geometry, ModelGeometry):
            return f"prefill worker {name}: {geometry}; start it with coterie's CountsConnector"
        if geometry != profile.geometry:
            return f"the profile is of {profile.geometry}, prefill worker {name} has {geometry}; fit a new profile"
    return None
