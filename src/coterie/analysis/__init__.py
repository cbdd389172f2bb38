"""What a trace or a profile tells: is expert locality there, and is it worth routing for?

`inspect_trace` measures everything and concludes; the functions below it take arrays and can be called by themselves,
for instance from a notebook.
"""

from coterie.analysis.active import DecodeUse
from coterie.analysis.batches import ActiveExperts, Estimate, active_experts
from coterie.analysis.correlation import Correlation, prefill_decode_correlation
from coterie.analysis.findings import Inspection
from coterie.analysis.fitted import ProfileInspection, inspect_profile
from coterie.analysis.heldout import ClusterReport, HeldOut, hold_out, judge, report_clusters
from coterie.analysis.inspection import inspect_trace
from coterie.analysis.projection import Projection, project
from coterie.analysis.usage import DomainUse, LayerSkew, domain_use, expert_skew
from coterie.analysis.verdict import Verdict, decide

__all__ = [
    "ActiveExperts",
    "ClusterReport",
    "Correlation",
    "DecodeUse",
    "DomainUse",
    "Estimate",
    "HeldOut",
    "Inspection",
    "LayerSkew",
    "ProfileInspection",
    "Projection",
    "Verdict",
    "active_experts",
    "decide",
    "domain_use",
    "expert_skew",
    "hold_out",
    "inspect_profile",
    "inspect_trace",
    "judge",
    "prefill_decode_correlation",
    "project",
    "report_clusters",
]
