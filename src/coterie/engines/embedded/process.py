"""A worker as a process: puts the parts together, serves, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from coterie.engines.embedded.engine import LONGEST_WAIT_S, Engine, EngineConfig
from coterie.engines.embedded.kv import KvFile, kv_kind
from coterie.engines.embedded.kv_server import KvServer
from coterie.engines.embedded.loads import Loads
from coterie.engines.embedded.mailbox import Mailbox
from coterie.engines.embedded.metrics import Metrics
from coterie.engines.embedded.pulls import Puller, Transport
from coterie.engines.embedded.scheduler import Limits
from coterie.engines.embedded.server import app
from coterie.engines.embedded.step_log import StepLog
from coterie.engines.embedded.text import Tokenizer
from coterie.engines.embedded.worker import Worker, WorkerRole
from coterie.errors import ConfigError, EngineError
from coterie.http_server import is_any, listen, serving_app, url_of
from coterie.latency import StepPoint
from coterie.modeling import Model, RemoteExperts, prepare
from coterie.modeling.prepare import Progress, open_weights

OnDecode = Callable[[StepPoint], None]
"""Is told of each decode step."""

_GRACE_S = 2
_LOOK_S = 0.5
_SWITCH_S = 0.0005  # the event loop waits so long for the engine's thread; by default ten times as long, a whole step
DEFAULT_KV_MEMORY_MIB = 256


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What `coterie engine` is told; its options say more.

    Attributes:
        model: folder of the checkpoint.
        served_model_name: what clients call it.
        weights_dir: folder of the packed weights; None for one below the user's cache folder.
        pad_intermediate: columns to pad each expert to; None for none.
        role: which parts of a divided request it takes.
        host: address to serve on.
        port: of it; 0 takes a free one.
        kv_host: address where other workers ask for KV.
        kv_port: of it; 0 takes a free one.
        kv_transport: how KV of others is fetched.
        kv_lease_s: how long KV waits for a decode worker.
        kv_timeout_s: the longest that fetching KV may take, and that a peer of this worker may take for a message or
            for taking in an answer.
        kv_blocks: blocks of the KV cache; None to go by `kv_memory_mib`.
        kv_memory_mib: memory of the KV cache.
        block_size: tokens of a block.
        max_model_len: most tokens of a prompt and its output; None for what the model was made for.
        max_num_seqs: most requests that run at once.
        max_batched_tokens: most tokens of a step.
        prefix_caching: whether KV is found again by its tokens.
        log_steps: file for measured decode steps; None for none.
        experts_overlap: tokens from which on a step is computed as two halves, which take turns while experts are
            computed elsewhere; None for never.

    Raises:
        ConfigError: `kv_host` is no address of one host, or `kv_timeout_s` is out of range.
    """

    model: Path
    served_model_name: str
    weights_dir: Path | None = None
    pad_intermediate: int | None = None
    role: WorkerRole = "both"
    host: str = "127.0.0.1"
    port: int = 8000
    kv_host: str = "127.0.0.1"
    kv_port: int = 0
    kv_transport: Transport = "auto"
    kv_lease_s: float = 30.0
    kv_timeout_s: float = 30.0
    kv_blocks: int | None = None
    kv_memory_mib: int = DEFAULT_KV_MEMORY_MIB
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_batched_tokens: int = 512
    prefix_caching: bool = True
    log_steps: Path | None = None
    experts_overlap: int | None = None

    def __post_init__(self) -> None:
        if is_any(self.kv_host):
            raise ConfigError(
                f"--kv-host {self.kv_host}: decode workers are told this address; name one they can reach"
            )
        if not 0 < self.kv_timeout_s <= LONGEST_WAIT_S:
            raise ConfigError(f"--kv-timeout {self.kv_timeout_s}: it must be positive and at most {LONGEST_WAIT_S}")


def run(
    config: WorkerConfig,
    *,
    on_ready: Callable[[str, str], None],
    progress: Progress | None = None,
    experts: RemoteExperts | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; requests that still run then end with an error.

    Args:
        config: what to serve.
        on_ready: told the URL and the kernel's name once clients are served.
        progress: told how far converting the weights is.
        experts: what computes the model's routed experts; None to do that here.

    Raises:
        CoterieError: the worker cannot start, or its engine has stopped by itself.
    """
    folder = config.weights_dir or default_weights_dir(config.model)
    with _step_log(config.log_steps) as on_decode:
        pad = config.pad_intermediate
        weights = prepare(config.model, folder, pad_intermediate=pad, routed=experts is None, progress=progress)
        model = Model.open(weights, experts=experts, overlap=config.experts_overlap)
        tokenizer = Tokenizer.load(config.model)
        uvloop.run(_run(config, model, tokenizer, open_weights(weights).header.source, on_ready, on_decode))


@contextlib.contextmanager
def _step_log(path: Path | None) -> Iterator[OnDecode | None]:
    log = StepLog(path) if path else None
    try:
        yield log.add if log else None
    finally:
        if log:
            log.close()


def default_weights_dir(model: Path) -> Path:
    """A folder of a checkpoint's own below the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = model.resolve()
    return cache / "coterie" / "weights" / f"{place.name}-{hashlib.blake2b(bytes(place), digest_size=6).hexdigest()}"


async def _run(
    config: WorkerConfig,
    model: Model,
    tokenizer: Tokenizer,
    source: str,
    on_ready: Callable[[str, str], None],
    on_decode: OnDecode | None,
) -> None:
    sys.setswitchinterval(_SWITCH_S)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with listen(config.host, config.port, "port") as listener, _kv_file(config, model, source) as kv:
        async with (
            _worker(config, model, tokenizer, kv, on_decode) as worker,
            serving_app(app(worker), listener, grace_s=_GRACE_S),
        ):
            on_ready(url_of(listener), model.kernel.name)
            while not stop.is_set() and worker.engine.problem is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _LOOK_S)
            problem = worker.engine.problem
            await asyncio.to_thread(worker.engine.close)  # what runs ends with an error, now
    if problem is not None:
        raise EngineError(f"the engine has stopped: {problem}")


@contextlib.contextmanager
def _kv_file(config: WorkerConfig, model: Model, source: str) -> Iterator[KvFile]:
    block_bytes = 4 * math.prod(model.kv_shape(1, config.block_size))
    blocks = config.kv_blocks or (config.kv_memory_mib << 20) // block_bytes
    if blocks < 1:
        raise ConfigError(f"a KV block takes {block_bytes} bytes; --kv-memory {config.kv_memory_mib} holds none")
    shape = model.kv_shape(blocks, config.block_size)
    kv = KvFile(shape, kv_kind(source, shape))
    try:
        yield kv
    finally:
        kv.close()


@contextlib.asynccontextmanager
async def _worker(
    config: WorkerConfig, model: Model, tokenizer: Tokenizer, kv: KvFile, on_decode: OnDecode | None
) -> AsyncIterator[Worker]:
    """The running parts of a worker; its engine is closed by the time it is left."""
    mailbox = Mailbox(asyncio.get_running_loop())
    puller = Puller(kv, config.kv_transport, config.kv_timeout_s)
    loads = Loads(puller)
    engine = Engine(
        model,
        tokenizer,
        kv.array,
        _engine_config(config, model, len(kv.array)),
        rng=np.random.default_rng(),
        on_load=lambda job: loads.start(engine, job),
        after_step=mailbox.flush,
        on_decode=on_decode,
    )
    kv_server = KvServer(kv, engine, patience_s=config.kv_timeout_s)
    if config.role != "decode":
        await kv_server.start(config.kv_host, config.kv_port)
    engine.start()
    try:
        yield Worker(
            model=config.served_model_name,
            root=str(config.model),
            role=config.role,
            engine=engine,
            engine_id=kv.engine_id,
            address=(config.kv_host, kv_server.port),
            tokenizer=tokenizer,
            mailbox=mailbox,
            loads=loads,
            metrics=Metrics(engine.stats, config.served_model_name, model.kernel.name),
            started_s=int(time.time()),
        )
    finally:
        await asyncio.to_thread(engine.close)
        await puller.close()
        await kv_server.close()


def _engine_config(config: WorkerConfig, model: Model, blocks: int) -> EngineConfig:
    most = model.config.max_positions
    length = config.max_model_len or most
    if length > most:
        raise ConfigError(f"--max-model-len {length} is more than the {most} positions that the model was made for")
    limits = Limits(config.max_num_seqs, config.max_batched_tokens, config.prefix_caching)
    return EngineConfig(blocks, config.block_size, length, config.kv_lease_s, limits)
