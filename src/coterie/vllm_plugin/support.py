"""What the counts connector refuses at start, each by name and with its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coterie.core import ModelGeometry
from coterie.errors import UnsupportedError

TESTED = ("0.32",)
ALLOW_UNTESTED = "coterie_allow_untested_vllm"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """The KV group whose blocks index the counts.

    Attributes:
        index: position among the model's KV groups.
        layer: name of one of its layers, under which the forward context keeps its slot mapping.
        block_size: tokens per block.
    """

    index: int
    layer: str
    block_size: int


def check_version(version: str, extra_config: dict[str, Any]) -> None:
    """Refuse vLLM releases whose hooks were not tested.

    Raises:
        UnsupportedError: naming the release, what was tested and how to insist.
    """
    if version.startswith(tuple(f"{release}." for release in TESTED)) or extra_config.get(ALLOW_UNTESTED) is True:
        return
    raise UnsupportedError(
        f"vLLM {version} was not tested with this coterie (tested: {', '.join(TESTED)}); install a tested release, "
        f'or set "{ALLOW_UNTESTED}": true in the connector\'s kv_connector_extra_config to try it'
    )


def check_config(config: Any) -> None:
    """Refuse configurations in which tokens would be missed or counted twice.

    Raises:
        UnsupportedError: naming the option and the remedy.
    """
    parallel = config.parallel_config
    for refused, what, remedy in (
        (config.model_config.get_num_experts() <= 1, "a dense model: there are no experts to count",
         "remove CountsConnector from --kv-transfer-config"),
        (config.speculative_config is not None, "speculative decoding: rejected tokens would be counted",
         "serve prefill without --speculative-config"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism: no rank sees all layers",
         "use tensor or expert parallelism on this worker"),
        (parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
         "context parallelism: KV slots are spread over ranks", "set both context-parallel sizes to 1"),
        (parallel.use_ubatching, "dual-batch overlap: half-batches overwrite one another's capture",
         "start without --enable-dbo"),
        (parallel.nnodes > 1 or parallel.distributed_executor_backend not in (None, "mp", "uni"),
         "workers on other hosts than the scheduler: sums travel through shared memory",
         "use one host per data-parallel rank with the mp executor"),
        (config.use_v2_model_runner and config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
         "full CUDA graphs on the V2 model runner: the step's slot mapping is not visible to connectors",
         'start with --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''),
    ):  # fmt: skip
        if refused:
            raise UnsupportedError(f"coterie cannot count experts with {what}; {remedy}")


def upper_geometry(config: Any) -> ModelGeometry:
    """Experts, top-k and all hidden layers (dense ones included) of the model."""
    model = config.model_config
    return ModelGeometry(model.get_total_num_hidden_layers(), model.get_num_experts(), model.get_num_experts_per_tok())


def full_attention_group(kv_cache_config: Any) -> KVGroup:
    """The KV group that keeps a block for every token of a request.

    Sliding-window and state-space groups free blocks behind the window, so only a full-attention group can
    index the counts of a whole prompt.

    Raises:
        UnsupportedError: the model has no such group.
    """
    groups = kv_cache_config.kv_cache_groups
    for index, group in enumerate(groups):
        if all(type(spec).__name__ in _FULL for spec in _specs(group.kv_cache_spec)):
            return KVGroup(index, group.layer_names[0], group.kv_cache_spec.block_size)
    kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups})) or "none"
    raise UnsupportedError(
        f"coterie cannot count experts with this KV cache layout: no full-attention group among {kinds}"
    )


_FULL = {"FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec"}


def _specs(spec: Any) -> list[Any]:
    return list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]
