"""`make demo-experts`: a cluster whose experts are in servers of their own, under load, while one is killed."""

from coterie.up.experts_demo.results import Phase, phases
from coterie.up.experts_demo.run import DemoOptions, ExpertsDemo

__all__ = ["DemoOptions", "ExpertsDemo", "Phase", "phases"]
