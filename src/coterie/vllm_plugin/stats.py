"""CPU time spent in the plugin's hooks, as metrics of the engine's own `/metrics`."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_METRICS = {
    "hook_cpu_seconds": ("coterie_plugin_hook_cpu_seconds", "CPU time inside the counts connector's hooks."),
    "steps": ("coterie_plugin_steps", "Engine steps that the counts connector counted."),
    "dropped": ("coterie_plugin_dropped", "Requests whose counts or ids could not be returned."),
}
REPORT_EVERY_S = 1.0


class HookClock:
    """Adds up the thread's CPU time inside `with clock:` blocks; nested blocks count once."""

    def __init__(self) -> None:
        self._depth = 0
        self._entered = 0.0
        self.seconds = 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._entered = time.thread_time()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.thread_time() - self._entered

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class CountsStats(KVConnectorStats):
    """Sums since the last report; reported about once a second, since each report travels between processes."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=dict.fromkeys(_METRICS, 0) if data is None else data)
        self._reported_s = time.monotonic()

    def take(self, clock: HookClock) -> CountsStats | None:
        """The sums, if a report is due; counting starts again at zero."""
        now = time.monotonic()
        if now - self._reported_s < REPORT_EVERY_S:
            return None
        self._reported_s = now
        taken = CountsStats({**self.data, "hook_cpu_seconds": clock.take()})
        self.reset()
        return taken

    def reset(self) -> None:
        """Start again at zero."""
        self.data = dict.fromkeys(_METRICS, 0)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another side's or interval's sums."""
        for name in _METRICS:
            self.data[name] += other.data[name]
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the engine's log line shows."""
        return {name: round(value, 4) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


class CountsPromMetrics(KVConnectorPromMetrics):
    """Counters `coterie_plugin_*_total` with vLLM's own labels."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: dict[int, Any]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._counters = {
            name: self._counter_cls(name=metric, documentation=text, labelnames=labelnames)
            for name, (metric, text) in _METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        for name, counter in self._counters.items():
            counter.labels(*self.per_engine_labelvalues[engine_idx]).inc(transfer_stats_data[name])
