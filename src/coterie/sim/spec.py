"""What a simulated cluster consists of, and what happens to it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from coterie.core import Role, WorkerState
from coterie.errors import ConfigError
from coterie.latency import HANDOFF_400G, PREFILL_MI300X, QWEN3_30B_MI300X, StepTime, TokenTime
from coterie.placement import Placement
from coterie.routing import Filter

ROLES: tuple[Role, ...] = get_args(Role)

_TOPOLOGY = re.compile(r"([1-9]\d{0,3})P([1-9]\d{0,3})D(?:x([1-9]\d{0,2}))?")


@dataclass(frozen=True, slots=True)
class Change:
    """A worker is lost, or comes (back) to the cluster.

    The ranks of an expert-parallel group come and go together, since the experts are spread over all of them.

    Attributes:
        time_s: when.
        worker: its name, such as `decode-3`; that of a group, or of any rank of it.
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
        decode: number of decode groups, `decode-0` and so on.
        ranks: data-parallel ranks of each group, `decode-0.0` and so on; with one, the group is the worker.
        expert_ranks: ranks that the experts of a group are spread over; by default its data-parallel ranks.  With
            tensor-parallel attention there are more: TP 4 with EP 4 (ELDR section on Qwen3-235B) is one rank that
            takes requests, and experts spread over 4.
        placements: of experts on these ranks, one for each group; by default contiguous blocks of experts.
        step_time: of decode steps.
        prefill_time: of a prefill step, by the tokens that it computes.
        handoff_time: from the choice of a decode worker until it holds the prompt's KV, by the prompt's tokens.
        prefill_budget_tokens: most tokens of a prefill step that has more than one prompt.
        batch_requests: most requests of a decode step, for each rank.
        graph_sizes: batch sizes, ascending, for which engines captured CUDA graphs: a batch costs as much as the next
            larger one.  Empty for steps that grow with each request.
        kv_tokens: tokens whose KV each decode rank holds; None for no limit.
        cache_tokens: tokens that the prefix cache of a prefill worker holds; 0 for none.
        block_tokens: tokens of a KV block.
        filters: that pass decode workers over, as in the gateway.
        reading_interval_s: between two readings of what decode workers say of themselves, for the filters.
        prefill_first: whether clients get their first token at the end of prefill, as in ELDR: the handoff then counts
            to TPOT instead of TTFT, and one token less is decoded.  By default it comes from the decode worker, as with
            this gateway.
        notice_s: time until the gateway learns that a worker was lost; requests that it sends there meanwhile fail.
            0 is as soon as breakers learn of it.
        absent: workers that are not there at the start, named as in `Change`.
        gateways: that share the workers; each request comes to one of them by chance.
        exchange_s: from what a gateway does until the others know of it; None if they never do.
        exchange_batches: whether they then also know what its requests use, not just how many they are.

    Raises:
        ConfigError: a number is out of range, an absent worker does not exist, or placements are not of the groups.
    """

    prefill: int
    decode: int
    ranks: int = 1
    expert_ranks: int | None = None
    placements: tuple[Placement, ...] = ()
    step_time: StepTime = QWEN3_30B_MI300X
    prefill_time: TokenTime = PREFILL_MI300X
    handoff_time: TokenTime = HANDOFF_400G
    prefill_budget_tokens: int = 8192
    batch_requests: int = 256
    graph_sizes: tuple[int, ...] = ()
    kv_tokens: int | None = None
    cache_tokens: int = 0
    block_tokens: int = 16
    filters: tuple[Filter, ...] = ()
    reading_interval_s: float = 1.0
    prefill_first: bool = False
    notice_s: float = 3.0
    absent: frozenset[str] = frozenset()
    gateways: int = 1
    exchange_s: float | None = 0.0
    exchange_batches: bool = True

    def __post_init__(self) -> None:
        for name in (
            "prefill",
            "decode",
            "ranks",
            "prefill_budget_tokens",
            "batch_requests",
            "block_tokens",
            "gateways",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"cluster: {name} must be at least 1, got {getattr(self, name)}")
        if self.cache_tokens < 0 or not (math.isfinite(self.notice_s) and self.notice_s >= 0):
            raise ConfigError(
                f"cluster: cache_tokens and notice_s must not be negative, got {self.cache_tokens}, {self.notice_s}"
            )
        if self.exchange_s is not None and not 0 <= self.exchange_s < math.inf:
            raise ConfigError(f"cluster: exchange_s must not be negative, got {self.exchange_s}")
        if not 0 < self.reading_interval_s < math.inf:
            raise ConfigError(f"cluster: reading_interval_s must be above zero, got {self.reading_interval_s}")
        if list(self.graph_sizes) != sorted({max(size, 1) for size in self.graph_sizes}):
            raise ConfigError(f"cluster: graph_sizes must be ascending and above zero, got {self.graph_sizes}")
        if self.kv_tokens is not None and self.kv_tokens < self.block_tokens:
            raise ConfigError(
                f"cluster: kv_tokens must be at least a block of {self.block_tokens}, got {self.kv_tokens}"
            )
        if self.expert_ranks is not None and self.expert_ranks < self.ranks:
            raise ConfigError(f"cluster: expert_ranks must be at least the {self.ranks} ranks, got {self.expert_ranks}")
        self._check_placements()
        for name in sorted(self.absent):
            self.members(name)

    def _check_placements(self) -> None:
        if self.placements and len(self.placements) != self.decode:
            raise ConfigError(f"cluster: {len(self.placements)} placements for {self.decode} decode groups")
        for placement in self.placements:
            if placement.ranks != self.holders:
                raise ConfigError(f"cluster: a placement on {placement.ranks} ranks for experts on {self.holders}")

    @property
    def holders(self) -> int:
        """Ranks that hold the experts of a group."""
        return self.expert_ranks or self.ranks

    def targets(self, role: Role) -> list[WorkerState]:
        """The workers of a role as the gateway knows them: names, groups and ranks."""
        groups = [f"{role}-{i}" for i in range(self.prefill if role == "prefill" else self.decode)]
        if role == "prefill" or self.ranks == 1:
            return [WorkerState(group, group, available=group not in self.absent) for group in groups]
        absent = {name.partition(".")[0] for name in self.absent}
        return [
            WorkerState(f"{group}.{rank}", group, rank, available=group not in absent)
            for group in groups
            for rank in range(self.ranks)
        ]

    def members(self, name: str) -> tuple[Role, tuple[str, ...]]:
        """Role and names of the workers that come and go with the one of this name, or that are in that group.

        Raises:
            ConfigError: there is none.
        """
        for role in ROLES:
            targets = self.targets(role)
            group = next((target.group for target in targets if name in (target.name, target.group)), None)
            if group is not None:
                return role, tuple(target.name for target in targets if target.group == group)
        raise ConfigError(f"cluster: no worker is named {name!r}")


@dataclass(frozen=True, slots=True)
class Topology:
    """How many workers there are.

    Attributes:
        prefill: prefill workers.
        decode: decode groups.
        ranks: data-parallel ranks of each group.
    """

    prefill: int
    decode: int
    ranks: int = 1


def parse_topology(text: str) -> Topology:
    """A topology from a text such as `8P16D`, or `2P4Dx8` with groups of 8 ranks.

    Raises:
        ConfigError: the text is another.
    """
    found = _TOPOLOGY.fullmatch(text)
    if not found:
        raise ConfigError(
            f"topology: {text[:60]!r} is not like 8P16D (8 prefill and 16 decode workers) or 2P4Dx8 (decode groups "
            "of 8 ranks)"
        )
    return Topology(int(found[1]), int(found[2]), int(found[3] or 1))
