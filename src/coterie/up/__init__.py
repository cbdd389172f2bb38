"""Local clusters: start, supervise, show and stop engines and gateway as one."""
