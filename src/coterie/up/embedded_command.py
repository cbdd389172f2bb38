"""The command line of one embedded engine of a local cluster."""

from __future__ import annotations

import sys

from coterie.core import Role
from coterie.up.config import ClusterConfig


def embedded_command(config: ClusterConfig, role: Role, host: str, port: int, kv_port: int) -> tuple[str, ...]:
    """The command of one engine; the pool's own arguments come last, so that they win."""
    pool = config.prefill if role == "prefill" else config.decode
    where = ("--host", host, "--port", str(port), "--kv-host", host, "--kv-port", str(kv_port))
    what = ("--role", role, "--served-model-name", config.served_model_name)
    weights = ("--weights-dir", str(config.run_dir / "weights"))
    return (sys.executable, "-m", "coterie", "engine", config.model, *what, *where, *weights, *pool.args)
