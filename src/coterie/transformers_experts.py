"""A Hugging Face model whose routed experts are in expert servers: no expert tensor is read, none is allocated.

transformers 5 looks up what computes the experts of a layer by name (`integrations.moe.ALL_EXPERTS_FUNCTIONS`); ours
sends the tokens.  The model is built without memory, its experts' parameters are taken out, and the checkpoint's other
tensors are put in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from coterie.errors import InputError, UnsupportedError
from coterie.experts.client import RemoteExperts
from coterie.modeling.expert_tensors import ExpertModel

IMPLEMENTATION = "coterie"
_EXPERTS = ".experts."
_RENAMED = {".block_sparse_moe.": ".mlp."}  # of Mixtral's checkpoints, as transformers calls it


def load_model(checkpoint: Path, model: ExpertModel, remote: RemoteExperts, *, timeout_s: float) -> Any:
    """Load a causal language model in float32, on the CPU, for inference.

    Args:
        checkpoint: its folder.
        model: what `read_expert_model` says of it.
        remote: its experts.
        timeout_s: the longest that a layer may take.

    Raises:
        InputError: the checkpoint lacks a tensor, or a file cannot be read.
        UnsupportedError: the model has parts that are made in other ways than from tensors.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _compute)
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation=IMPLEMENTATION)
    _take_out_experts(built, model, remote, timeout_s)
    _put_in(built, checkpoint)
    _make_tables(built, config)
    return built.eval()


def _compute(experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What transformers calls: `[T, H]`, `[T, K]` and `[T, K]` to `[T, H]`."""
    layer, remote, timeout_s = experts.coterie
    with torch.no_grad():
        arrays = (hidden.contiguous().numpy(), ids.numpy(), weights.to(torch.float32).numpy())
        return torch.from_numpy(remote.compute(layer, *arrays, time.monotonic() + timeout_s))


def _take_out_experts(built: Any, model: ExpertModel, remote: RemoteExperts, timeout_s: float) -> None:
    for number, position in enumerate(model.moe_layers):
        experts = built.model.layers[position].mlp.experts
        for name in [name for name, _ in experts.named_parameters()]:
            delattr(experts, name)
        experts.coterie = number, remote, timeout_s


def _put_in(built: Any, checkpoint: Path) -> None:
    """Give the model the checkpoint's tensors, but for those of experts."""
    missing, unexpected = built.load_state_dict(dict(_other_tensors(checkpoint)), strict=False, assign=True)
    built.tie_weights()
    lacking = [name for name in missing if built.get_parameter(name).is_meta]
    if lacking or unexpected:
        raise InputError(
            f"{checkpoint}: lacks {lacking[:3]}, and has {unexpected[:3]} which the model does not; "
            "is it a checkpoint of this transformers version?"
        )


def _other_tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise InputError(f"{checkpoint}: there are no safetensors files")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                if _EXPERTS not in name:
                    yield _renamed(name), tensors.get_tensor(name).to(torch.float32)


def _renamed(name: str) -> str:
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    return name


def _make_tables(built: Any, config: Any) -> None:
    """Make the rotary angles, which no checkpoint has.

    Raises:
        UnsupportedError: the model has other parts that are in no checkpoint.
    """
    for name, module in list(built.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            if not type(module).__name__.endswith("RotaryEmbedding"):
                raise UnsupportedError(f"{name}: a {type(module).__name__} is in no checkpoint; it cannot be made here")
            built.set_submodule(name, type(module)(config))
