"""The two ends of a remote layer as operators, and the connections of this process.

On a CPU torch.compile would trace into what a layer calls; it does not look into operators.  The host sends and takes
the tokens: on a GPU these operators must not be captured in a CUDA graph (see docs/experts.md).  They wait for the
device alone when they copy; for servers the host waits, and until a deadline.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.utils.torch_utils import direct_register_custom_op

from coterie.errors import EngineError, UnsupportedError
from coterie.experts.client import RemoteExperts
from coterie.experts.client.model_experts import ExpertsConfig, remote_experts
from coterie.experts.protocol import Dtype
from coterie.modeling.expert_tensors import read_expert_model

_DTYPES = {torch.float32: Dtype.FLOAT32, torch.float16: Dtype.FLOAT16, torch.bfloat16: Dtype.BFLOAT16}


@dataclass(slots=True)
class _Connections:
    """Of one process: a fork has none."""

    process: int
    remote: RemoteExperts
    layer_of: dict[int, int]
    timeout_s: float
    tickets: itertools.count[int] = field(default_factory=itertools.count)
    under_way: dict[int, Callable[[], npt.NDArray[np.float32]]] = field(default_factory=dict)


_connections: _Connections | None = None


def connect(checkpoint: str, config: ExpertsConfig) -> None:
    """Connect this process to the servers of a checkpoint's experts, once.

    Raises:
        ConfigError: the monitor's URL is none.
        EngineError: some expert has no server, even after a while.
        InputError: the checkpoint cannot be read.
        UnsupportedError: an architecture whose experts are not computed.
    """
    global _connections  # noqa: PLW0603 - operators have no other place for it
    if _connections is not None and _connections.process == os.getpid():
        return
    folder, stack = Path(checkpoint), ExitStack()
    remote = stack.enter_context(remote_experts(folder, config))
    atexit.register(stack.close)
    layers = {hidden: number for number, hidden in enumerate(read_expert_model(folder).moe_layers)}
    _connections = _Connections(os.getpid(), remote, layers, config.timeout_s)


def _start(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, hidden_layer: int) -> torch.Tensor:
    """Send this rank's tokens; gives a ticket."""
    own, dtype, connections = _own_rows(len(hidden)), _dtype(hidden), _connected()
    deadline_s = time.monotonic() + connections.timeout_s
    started = connections.remote.start(
        connections.layer_of[hidden_layer],
        _array(hidden[own], dtype),
        ids[own].to(torch.int32).cpu().numpy(),
        weights[own].to(torch.float32).cpu().numpy(),
        dtype,
    )
    ticket = next(connections.tickets)
    connections.under_way[ticket] = partial(started.finish, deadline_s)
    return torch.tensor([ticket])


def _finish(ticket: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The sums for a ticket, `[T, H]`; zeros in the place of other ranks' tokens, which an all-reduce adds."""
    sums = torch.from_numpy(_connected().under_way.pop(int(ticket.item()))())
    if len(sums) == len(hidden):
        return sums.to(hidden)
    result = hidden.new_zeros(hidden.shape)
    result[_own_rows(len(hidden))] = sums.to(hidden)
    return result


def _own_rows(tokens: int) -> slice:
    """Tensor-parallel ranks have the same tokens; each asks for its share of them."""
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    return slice(tokens * rank // ranks, tokens * (rank + 1) // ranks)


def _array(hidden: torch.Tensor, dtype: Dtype) -> npt.NDArray[Any]:
    """On the host; brain floats as their bits, which numpy has no name for."""
    own = hidden.contiguous().cpu()
    array: npt.NDArray[Any] = (own.view(torch.uint16) if dtype is Dtype.BFLOAT16 else own).numpy()
    return array


def _dtype(hidden: torch.Tensor) -> Dtype:
    if hidden.dtype not in _DTYPES:
        raise UnsupportedError(f"expert servers take no hidden states of {hidden.dtype}")
    return _DTYPES[hidden.dtype]


def _connected() -> _Connections:
    if _connections is None or _connections.process != os.getpid():
        raise EngineError("this process has no connection to expert servers; load the model with the same load format")
    return _connections


def _no_ticket(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, hidden_layer: int) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _no_sums(ticket: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


direct_register_custom_op("coterie_experts_start", _start, fake_impl=_no_ticket)
direct_register_custom_op("coterie_experts_finish", _finish, fake_impl=_no_sums)
