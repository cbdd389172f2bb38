"""The command line of one embedded engine of a local cluster."""

from __future__ import annotations

import sys

from coterie.core import Role
from coterie.up.config import ClusterConfig


def embedded_command(
    config: ClusterConfig, role: Role, host: str, port: int, kv_port: int, monitor: str | None = None
) -> tuple[str, ...]:
    """The command of one engine; the pool's own arguments come last, so that they win.

    Args:
        config: of the cluster.
        role: of the engine.
        host: where it serves.
        port: where it serves.
        kv_port: where it hands over KV.
        monitor: URL of the monitor of the servers that compute its experts; None if it does so itself.
    """
    pool = config.prefill if role == "prefill" else config.decode
    where = ("--host", host, "--port", str(port), "--kv-host", host, "--kv-port", str(kv_port))
    what = ("--role", role, "--served-model-name", config.served_model_name)
    weights = ("--weights-dir", str(config.run_dir / "weights"))
    experts = ("--experts-from", monitor) if monitor else ()
    return (sys.executable, "-m", "coterie", "engine", config.model, *what, *where, *weights, *experts, *pool.args)
