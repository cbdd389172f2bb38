"""Who decodes what: policies that read, one ledger that writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from coterie.activations import ActivationTrace
from coterie.calibration import Profile
from coterie.core import WorkerState
from coterie.errors import ConfigError
from coterie.routing.background import TICK_S, Background, Job
from coterie.routing.band import DEFAULT_TAU
from coterie.routing.domain import Domain
from coterie.routing.filters import STALE_AFTER, Filter, KvHeadroom, no_queue
from coterie.routing.ledger import Lease, LeaseTotals, Ledger, Load, Others, Watcher
from coterie.routing.load import LeastLoad, PowerOfTwo, Random, RoundRobin
from coterie.routing.locality import Locality, groups_of
from coterie.routing.marginal import Marginal, Share, Sharing
from coterie.routing.policy import Policy, Reads, Shown, random_stream, route
from coterie.routing.prefix import PREFIX_BYTES, Prefix
from coterie.routing.refit import DEFAULT_WINDOW_S, LocalityRefit

__all__ = [
    "DECODE_POLICIES",
    "DEFAULT_TAU",
    "DEFAULT_WINDOW_S",
    "PREFILL_POLICIES",
    "PREFIX_BYTES",
    "STALE_AFTER",
    "TICK_S",
    "Background",
    "Domain",
    "Filter",
    "Job",
    "KvHeadroom",
    "Lease",
    "LeaseTotals",
    "LeastLoad",
    "Ledger",
    "Load",
    "Locality",
    "LocalityRefit",
    "Marginal",
    "OnMismatch",
    "Others",
    "Policy",
    "PowerOfTwo",
    "Prefix",
    "Random",
    "Reads",
    "RoundRobin",
    "Share",
    "Sharing",
    "Shown",
    "Watcher",
    "groups_of",
    "make_policy",
    "no_queue",
    "random_stream",
    "route",
]

LOAD_POLICIES = ("round_robin", "random", "least_load", "power_of_two")
DECODE_POLICIES = (*LOAD_POLICIES, "domain", "locality", "locality_refit", "locality_adaptive", "marginal")
PREFILL_POLICIES = (*LOAD_POLICIES, "prefix")

OnMismatch = Literal["error", "load"]
"""What to do when a profile has another number of centroids than there are decode groups."""


def make_policy(
    name: str,
    targets: Sequence[WorkerState],
    *,
    profile: Profile | None = None,
    trace: ActivationTrace | None = None,
    tau: float = DEFAULT_TAU,
    on_mismatch: OnMismatch = "error",
    refit_window_s: float = DEFAULT_WINDOW_S,
) -> Policy:
    """Make a policy by its name on the command line.

    Args:
        name: one of `DECODE_POLICIES` or `PREFILL_POLICIES`.
        targets: all workers that may ever be chosen from, in the gateway's order.
        profile: needed by all that begin with `locality`.
        trace: labelled requests, needed by `domain`.
        tau: width of the band of `locality` and `locality_refit`.
        on_mismatch: `error`, or `load` to route by load alone where the profile has another number of centroids
            than there are decode groups; the other two adapt it instead.
        refit_window_s: how far back the window of `locality_refit` and `locality_adaptive` reaches.

    Raises:
        ConfigError: the name is unknown, what the policy needs is missing, or tau or the window is out of range.
        ProfileError: the numbers of centroids and groups differ.
    """
    match name:
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random()
        case "least_load":
            return LeastLoad()
        case "power_of_two":
            return PowerOfTwo()
        case "prefix":
            return Prefix(targets)
        case "marginal":
            return Marginal(targets)
        case "domain":
            return _make_domain(trace, targets)
        case "locality":
            return _make_locality(_needed(profile, name), targets, tau, on_mismatch)
        case "locality_refit":
            return LocalityRefit(_needed(profile, name), targets, tau, refit_window_s)
        case "locality_adaptive":
            return LocalityRefit(_needed(profile, name), targets, None, refit_window_s)
    known = ", ".join(dict.fromkeys(DECODE_POLICIES + PREFILL_POLICIES))
    raise ConfigError(f"unknown policy {name!r}; there are {known}")


def _make_domain(trace: ActivationTrace | None, targets: Sequence[WorkerState]) -> Policy:
    if trace is None:
        raise ConfigError("the policy domain needs a labelled trace; record one with `coterie collect`")
    return Domain(trace, targets)


def _needed(profile: Profile | None, name: str) -> Profile:
    if profile is None:
        raise ConfigError(f"the policy {name} needs a profile; make one with `coterie fit` and give it by `--profile`")
    return profile


def _make_locality(profile: Profile, targets: Sequence[WorkerState], tau: float, on_mismatch: OnMismatch) -> Policy:
    groups = len(groups_of(targets))
    if on_mismatch == "load" and profile.clusters != groups:
        return LeastLoad("load only: profile mismatch", f"{profile.clusters} centroids for {groups} decode groups")
    return Locality(profile, targets, tau)
