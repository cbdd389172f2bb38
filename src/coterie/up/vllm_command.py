"""The command line and environment of one vLLM server of a local cluster on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coterie.core import Role
from coterie.engines.vllm_nixl import kv_transfer_config
from coterie.errors import ConfigError
from coterie.up.config import ClusterConfig

# One process runs scheduler and model: with vLLM's worker processes, each side spins on shared memory while it
# waits for the other, and engines that share few cores starve one another.
_FLAGS = ("--max-model-len", "1024", "--enforce-eager", "--dtype", "float32", "--distributed-executor-backend", "uni")


def vllm_command(config: ClusterConfig, role: Role, host: str, port: int) -> tuple[str, ...]:
    """The command of one engine; the pool's own arguments come last, so that they win.

    Raises:
        ConfigError: the engine's environment holds no vLLM.
    """
    pool = config.prefill if role == "prefill" else config.decode
    transfer = kv_transfer_config(role, kv_buffer_device="cpu")
    return serve_command(config.engine_env, config.model, config.served_model_name, host, port, transfer, pool.args)


def serve_command(
    engine_env: Path, model: str, served_name: str, host: str, port: int, transfer: str, arguments: Sequence[str]
) -> tuple[str, ...]:
    """`vllm serve` on a CPU; `arguments` come last, so that they win.

    Raises:
        ConfigError: the environment holds no vLLM.
    """
    program = str(vllm_program(engine_env))
    where = ("--served-model-name", served_name, "--host", host, "--port", str(port))
    return (program, "serve", model, *where, *_FLAGS, "--kv-transfer-config", transfer, *arguments)


def vllm_program(engine_env: Path) -> Path:
    """The `vllm` program of an environment.

    Raises:
        ConfigError: there is none.
    """
    program = engine_env / "bin" / "vllm"
    if not program.is_file():
        raise ConfigError(
            f"there is no vLLM in {engine_env}; run `make vllm-env`, or name its environment in COTERIE_VLLM_ENV"
        )
    return program


def vllm_env(host: str, side_channel_port: int) -> dict[str, str]:
    """Environment of one engine: one thread, 1 GiB of KV cache, the older model runner, NIXL over TCP."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or vLLM replaces the `uni` executor on CPUs
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the newer one needs Triton, which has no CPU build
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "UCX_TLS": "tcp,self,sm",
        "UCX_NET_DEVICES": "lo",
    }
