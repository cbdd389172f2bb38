"""A simulated cluster under the gateway's own policies and ledger.

Read first: `cluster` (one request's life), `workers` (what takes time), `experts` (what locality saves).
"""

from __future__ import annotations

from coterie.sim.cluster import Decided
from coterie.sim.experts import ExpectedExperts, ReplayedExperts
from coterie.sim.result import Row
from coterie.sim.run import simulate
from coterie.sim.spec import Change, ClusterSpec, parse_topology
from coterie.sim.timeline import Recovery, Window, recoveries, windows
from coterie.sim.workload import Drift, Mix, Population, RecordedTimes, Stream, Traffic, population_of, read_arrivals

__all__ = [
    "Change",
    "ClusterSpec",
    "Decided",
    "Drift",
    "ExpectedExperts",
    "Mix",
    "Population",
    "RecordedTimes",
    "Recovery",
    "ReplayedExperts",
    "Row",
    "Stream",
    "Traffic",
    "Window",
    "parse_topology",
    "population_of",
    "read_arrivals",
    "recoveries",
    "simulate",
    "windows",
]
