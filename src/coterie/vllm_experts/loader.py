"""Reads a checkpoint without its routed experts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from coterie.errors import ConfigError
from coterie.experts.client.model_experts import ExpertsConfig
from coterie.vllm_experts import layer, ops

log = logging.getLogger("coterie.experts")
_EXPERTS = ".experts."
_KEYS = {"monitor", "timeout_s"}


class ExpertlessLoader(DefaultModelLoader):
    """vLLM's own loader, but for the tensors that it is not given.

    Args:
        load_config: its `model_loader_extra_config` has `monitor`, a URL, and maybe `timeout_s`, the longest that a
            layer may take.

    Raises:
        ConfigError: the monitor is not named, or there are other keys.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        self._experts = read_config(load_config.model_loader_extra_config)
        own = copy.copy(load_config)
        own.load_format, own.model_loader_extra_config = "safetensors", {}
        super().__init__(own)
        layer.replace_layers()

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Read the other tensors, and connect to the experts, so that a model without them does not start."""
        super().load_weights(model, model_config)
        ops.connect(model_config.model, self._experts)

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, torch.Tensor]]:
        _, files, _, _ = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        left = 0
        for file in sorted(files):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    if _EXPERTS in name:
                        left += 1
                    else:
                        yield source.prefix + name, tensors.get_tensor(name)
        log.info("%d tensors of routed experts were left unread; servers have them", left)


def read_config(extra: Any) -> ExpertsConfig:
    """The experts' place in a loader's configuration.

    Raises:
        ConfigError: the monitor is not named, there are other keys, or a value is wrong.
    """
    if not isinstance(extra, dict) or not {"monitor"} <= extra.keys() <= _KEYS:
        raise ConfigError(f"model_loader_extra_config {extra!r}: need 'monitor', a URL, and maybe 'timeout_s'")
    return ExpertsConfig(name="vllm", **extra)
