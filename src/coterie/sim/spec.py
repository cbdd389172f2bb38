"""What a simulated cluster consists of, and what happens to it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from coterie.core import Role, WorkerState
from coterie.errors import ConfigError
from coterie.latency import HANDOFF_400G, PREFILL_MI300X, QWEN3_30B_MI300X, StepTime, TokenTime

ROLES: tuple[Role, ...] = get_args(Role)

_TOPOLOGY = re.compile(r"([1-9]\d{0,3})P([1-9]\d{0,3})D")


@dataclass(frozen=True, slots=True)
class Change:
    """A worker is lost, or comes (back) to the cluster.

    Attributes:
        time_s: when.
        worker: its name, such as `decode-3`.
        kind: `lost` or `joined`.
    """

    time_s: float
    worker: str
    kind: Literal["lost", "joined"]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster.

    Attributes:
        prefill: number of prefill workers, `prefill-0` and so on.
        decode: number of decode workers, `decode-0` and so on, each an expert-parallel group of its own.
        step_time: of decode steps.
        prefill_time: of a prefill step, by the tokens that it computes.
        handoff_time: from the choice of a decode worker until it holds the prompt's KV, by the prompt's tokens.
        prefill_budget_tokens: most tokens of a prefill step that has more than one prompt.
        batch_requests: most requests of a decode step.
        cache_tokens: tokens that the prefix cache of a prefill worker holds; 0 for none.
        block_tokens: tokens of a KV block.
        prefill_first: whether clients get their first token at the end of prefill, as in ELDR: the handoff then counts
            to TPOT instead of TTFT, and one token less is decoded.  By default it comes from the decode worker, as with
            this gateway.
        notice_s: time until the gateway learns that a worker was lost; requests that it sends there meanwhile fail.
        absent: workers that are not there at the start.

    Raises:
        ConfigError: a number is out of range, or an absent worker does not exist.
    """

    prefill: int
    decode: int
    step_time: StepTime = QWEN3_30B_MI300X
    prefill_time: TokenTime = PREFILL_MI300X
    handoff_time: TokenTime = HANDOFF_400G
    prefill_budget_tokens: int = 8192
    batch_requests: int = 256
    cache_tokens: int = 0
    block_tokens: int = 16
    prefill_first: bool = False
    notice_s: float = 3.0
    absent: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "prefill_budget_tokens", "batch_requests", "block_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cluster: {name} must be at least 1, got {getattr(self, name)}")
        if self.cache_tokens < 0 or not (math.isfinite(self.notice_s) and self.notice_s >= 0):
            raise ConfigError(
                f"cluster: cache_tokens and notice_s must not be negative, got {self.cache_tokens}, {self.notice_s}"
            )
        if unknown := self.absent - {target.name for role in ROLES for target in self.targets(role)}:
            raise ConfigError(f"cluster: no worker is named {min(unknown)!r}")

    def targets(self, role: Role) -> list[WorkerState]:
        """The workers of a role, named as the gateway names them."""
        names = [f"{role}-{i}" for i in range(self.prefill if role == "prefill" else self.decode)]
        return [WorkerState(name, name, available=name not in self.absent) for name in names]


def parse_topology(text: str) -> tuple[int, int]:
    """Numbers of prefill and decode workers from a text such as `8P16D`.

    Raises:
        ConfigError: the text is another.
    """
    found = _TOPOLOGY.fullmatch(text)
    if not found:
        raise ConfigError(f"topology: {text[:60]!r} is not like 8P16D (8 prefill and 16 decode workers)")
    return int(found[1]), int(found[2])
