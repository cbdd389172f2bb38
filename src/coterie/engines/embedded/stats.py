"""Figures of a running engine."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.engines.embedded.request import FinishReason


@dataclass(frozen=True, slots=True)
class Stats:
    """What the engine does now, and what it has done since it was made.

    Attributes:
        waiting: requests without blocks.
        running: requests that are computed.
        loading: requests whose blocks are being filled from outside.
        kept: finished prompts whose blocks wait for another engine.
        kv_usage: part of the blocks that is held, from 0 to 1.
        prompt_tokens: tokens of the prompts that were finished.
        output_tokens: tokens that were sampled.
        preemptions: requests that lost their blocks.
        prefix_queries: tokens that were looked up in the cache.
        prefix_hits: tokens of these that were found.
        fetched: tokens whose keys and values another engine was asked for.
        finished: requests that ended, by reason.
        steps: steps computed.
        step_tokens: tokens forwarded in them.
        active_experts: `[L]` experts that a step used, summed over the steps.
        step_cpu_s: processor time of the engine's thread in steps, in seconds.
    """

    waiting: int
    running: int
    loading: int
    kept: int
    kv_usage: float
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    fetched: int
    finished: dict[FinishReason, int]
    steps: int
    step_tokens: int
    active_experts: tuple[int, ...]
    step_cpu_s: float


@dataclass(slots=True)
class Totals:
    """Counters of `Stats` that the engine itself writes."""

    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Counters of `Stats` that belong together: a value, so that no reader sees one step in some of them only."""

    steps: int = 0
    step_tokens: int = 0
    active_experts: tuple[int, ...] = ()
    step_cpu_s: float = 0.0
