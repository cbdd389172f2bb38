"""The counts connector as vLLM sees it.

Load it beside the connector that moves KV, on prefill servers (and on servers used to collect traces):

    --kv-transfer-config '{"kv_connector": "MultiConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"connectors": [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        {"kv_connector": "CountsConnector", "kv_role": "kv_both",
         "kv_connector_module_path": "coterie.vllm_plugin.connector"}]}}'

Per step, on the worker:

    bind_connector_metadata   restart rows, remember the step's slot mapping
    (forward)                 each layer's router hands its expert ids to `capture`
    finish_forward (V2 runner) or wait_for_save (V1)   count tokens into rows, sum finished prompts, copy ids
"""

from __future__ import annotations

import logging
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from coterie.blockrows import HostRows, Rows
from coterie.core import ModelGeometry
from coterie.vllm_plugin import register, support
from coterie.vllm_plugin.blocks import DeviceRows
from coterie.vllm_plugin.capture import DeviceCapture, HostCapture, bind_capture
from coterie.vllm_plugin.output_ids import IdsJob
from coterie.vllm_plugin.plan import CountsPlan, StepPlan
from coterie.vllm_plugin.slots import Layout, Slots
from coterie.vllm_plugin.stats import CountsPromMetrics, CountsStats, HookClock

log = logging.getLogger("vllm.coterie")

register()


class CountsMetadata(KVConnectorMetadata):
    """One step's plan, from the scheduler to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class CountsConnector(KVConnectorBase_V1, SupportsHMA):
    """Counts experts per KV block and returns a prompt's counts with its reply; transfers no KV."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        support.check_version(vllm.__version__, self._kv_transfer_config.kv_connector_extra_config)
        support.check_config(vllm_config)
        self._group = support.full_attention_group(kv_cache_config)
        self._geometry = support.upper_geometry(vllm_config)
        # a request holds its slot from the end of its prompt on; preempted ones keep it while they wait
        scheduling = vllm_config.scheduler_config
        self._layout = Layout(2 * scheduling.max_num_seqs, self._geometry, scheduling.max_num_batched_tokens)
        self._clock = HookClock()
        self._stats = CountsStats()
        self._scheduler: CountsPlan | None = None
        self._worker: _Worker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = CountsPlan(self._layout, self._group.block_size)

    @property
    def requires_kv_delivery(self) -> bool:
        """No KV is handed off here."""
        return False

    # --- worker -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Attach to the routers and allocate the rows; the model is loaded by now."""
        device = next(iter(kv_caches.values())).device
        capture = bind_capture(self._vllm_config, device, self._clock)
        geometry = ModelGeometry(len(capture.layers), self._geometry.experts, self._geometry.top_k)
        blocks, size = self._kv_cache_config.num_blocks, self._group.block_size
        rows: Rows = HostRows(blocks, size, geometry) if capture.on_host else DeviceRows(blocks, size, geometry, device)
        self._worker = _Worker(capture, rows, geometry, self._group.layer, self._layout)
        kv_bytes = sum(tensor.size for tensor in self._kv_cache_config.kv_cache_tensors)
        log.info(
            "coterie: counting experts of %s; store %.2f MiB for %d KV blocks, %.3f %% of KV memory",
            self._worker.geometry,
            self._worker.rows.nbytes / 2**20,
            blocks,
            100 * self._worker.rows.nbytes / max(kv_bytes, 1),
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start of a step."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, CountsMetadata)
        if self._worker is not None:
            with self._clock:
                self._stats.data["steps"] += self._worker.keeps_rows
                self._worker.begin(connector_metadata.plan)

    def finish_forward(self) -> None:
        """The forward is enqueued (V2 model runner)."""
        if self._worker is not None:
            with self._clock:
                self._worker.end()

    def wait_for_save(self) -> None:
        """The forward is enqueued (V1 model runner); nothing is left to do where `finish_forward` ran."""
        self.finish_forward()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    # --- scheduler ----------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Remember requests whose counts are wanted."""
        with self._clock:
            self._plan.request_added(request.request_id, request.num_prompt_tokens, request.kv_transfer_params)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is matched; the local prefix hit is noted."""
        with self._clock:
            self._plan.prefix_looked_up(request.request_id, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks beyond the local hit restart."""
        with self._clock:
            self._plan.blocks_given(request.request_id, blocks.get_block_ids()[self._group.index])

    def build_connector_meta(self, scheduler_output: Any) -> CountsMetadata:
        """Plan the step."""
        with self._clock:
            state = scheduler_output.kv_connector_block_state
            group = self._group.index
            plan = self._plan.step(_scheduled(scheduler_output), lambda request: state.get_block_ids(request)[group])
            return CountsMetadata(plan)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return the envelopes, where they were asked for."""
        with self._clock:
            params = self._plan.request_finished(request.request_id, request.num_tokens)
            self._stats.data["dropped"] += self._plan.take_dropped()
            return False, params

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, for models with several KV groups."""
        return self.request_finished(request, [])

    @property
    def _plan(self) -> CountsPlan:
        assert self._scheduler is not None, "a scheduler hook was called on a worker"
        return self._scheduler

    def shutdown(self) -> None:
        """Leave nothing in shared memory."""
        if self._scheduler is not None:
            self._scheduler.close()

    # --- metrics ------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> CountsStats | None:
        """Sums since the last report, if one is due."""
        return self._stats.take(self._clock)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CountsStats:
        """Rebuild a report from its payload."""
        return CountsStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, Any]
    ) -> CountsPromMetrics:
        """The engine's counters of this connector."""
        return CountsPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _scheduled(output: Any) -> dict[str, tuple[int, int]]:
    """Request id -> (tokens computed before the step, tokens of the step)."""
    tokens = output.num_scheduled_tokens
    cached = output.scheduled_cached_reqs
    scheduled = {new.req_id: (new.num_computed_tokens, tokens[new.req_id]) for new in output.scheduled_new_reqs}
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        scheduled[request_id] = (computed, tokens[request_id])
    return scheduled


class _Worker:
    """Counts the tokens of each forward pass and sums finished prompts."""

    def __init__(
        self, capture: HostCapture | DeviceCapture, rows: Rows, geometry: ModelGeometry, layer: str, layout: Layout
    ) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        self.geometry = geometry
        self.rows = rows
        # every rank captures, since capture may gather across ranks; one of them keeps the rows
        self.keeps_rows = bool(get_tp_group().is_first_rank)
        self._capture = capture
        self._layer = layer
        self._layout = layout
        self._slots: Slots | None = None
        self._step: StepPlan | None = None
        self._slot_mapping: Any = None

    def begin(self, plan: StepPlan) -> None:
        if not self.keeps_rows:
            return
        if self._slots is None:
            self._slots = Slots.open(plan.slots_path, self._layout)
            self._slots.announce(self.geometry.layers)
        self._step = plan
        self._slot_mapping = _slot_mapping(self._layer)
        if plan.restart:
            self.rows.restart(plan.restart)

    def end(self) -> None:
        """Count the step once, however many hooks announce the forward's end."""
        plan, self._step = self._step, None
        if plan is None:
            return
        assert self._slots is not None
        mapping, self._slot_mapping = self._slot_mapping, None
        if mapping is not None:
            self._count(mapping, plan.ids, self._slots)
        for job in plan.jobs:
            self._slots.write(job.slot, job.part, job.ticket, *self.rows.sum(job.blocks))

    def _count(self, mapping: Any, job: IdsJob | None, slots: Slots) -> None:
        ids = self._capture.take(mapping.shape[0])
        if ids is None:
            return
        self.rows.add(mapping, ids)
        if job is not None and (asked := self.rows.ids_at(mapping, ids, job.kv_slots)) is not None:
            slots.write_ids(job.page, job.ticket, asked)


def _slot_mapping(layer: str) -> Any:
    """`[T]` KV slots of the step's tokens, or None in a step without a forward."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return None
    mapping = get_forward_context().slot_mapping
    assert isinstance(mapping, dict), "half-batches are refused at start"
    return mapping.get(layer)
