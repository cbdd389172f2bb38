"""The demo: one cluster of engines, the same requests under several policies, what differed.

schedule   which requests are served when, under which policy; drawn before anything runs
run        calibrate, start a gateway for each policy, serve the schedule
client     sends streamed requests and notes when their tokens arrive
counters   what the decode engines count: steps, active experts
results    from what was gathered to the figures that are reported
page       the report in HTML
"""

from coterie.up.demo.results import DemoResult
from coterie.up.demo.run import DemoReporter, run_demo
from coterie.up.demo.schedule import DEFAULT_MIXES, MIXES, POLICIES, DemoOptions, Schedule, draw_schedule

__all__ = [
    "DEFAULT_MIXES",
    "MIXES",
    "POLICIES",
    "DemoOptions",
    "DemoReporter",
    "DemoResult",
    "Schedule",
    "draw_schedule",
    "run_demo",
]
