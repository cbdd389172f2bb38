"""How a transformers model routes: its MoE layers, and hooks that hear what they choose.

Since transformers 5 the MoE block of nearly every architecture is built alike: a router, called `gate` or
`router`, scores the tokens, and its sibling `experts` is called with their hidden states `[T, D]`, expert
ids `[T, k]` and weights `[T, k]`.  Ids are heard at the experts' door, so they are what ran, whatever rule
chose them; logits `[T, E]` are what the router returns.

**The gate probability** of an expert is the score by which its architecture chooses, over all E experts:

    softmax(logits)   Mixtral, Qwen3-MoE, OLMoE, Gemma 4; and GPT-OSS, whose softmax over the chosen k is the
                      one over all E, normalised again
    sigmoid(logits)   DeepSeek-V3, without the correction bias, which only chooses (arXiv 2412.19437, Eq. 15)

Of another architecture the rule is inferred: in all of these the weights of the chosen experts are in
proportion to their scores, also where they are normalised or scaled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from coterie.core import ModelGeometry
from coterie.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

Scoring = Literal["softmax", "sigmoid"]

_SCORING: dict[str, Scoring] = {
    "deepseek_v3": "sigmoid",
    "gemma4_text": "softmax",
    "gpt_oss": "softmax",
    "mixtral": "softmax",
    "olmoe": "softmax",
    "qwen3_moe": "softmax",
}
_SCORER = {"gemma4_text": "proj"}  # child of the router that computes the logits, where the router returns others
_ROUTERS = ("gate", "router")
_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_TOP_K_KEYS = ("num_experts_per_tok", "top_k_experts")
_PROBE_TOKENS = 16
_EVEN = 0.03  # how far weights may be from proportion: bfloat16 rounds each to 2^-9
_ELSEWHERE = "Collect from a vLLM server instead, with coterie collect --server"


class Listener(Protocol):
    """Hears a model's forward passes, MoE layer by MoE layer."""

    def scored(self, layer: int, logits: torch.Tensor) -> None:
        """The router's logits `[T, E]`."""
        ...

    def chosen(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """The experts that run, `[T, k]`, and their weights."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class MoeLayer:
    """One MoE layer.

    Attributes:
        name: of its experts among the model's modules.
        experts: the module that is called with ids.
        scorer: the module that returns the logits, alone or in a tuple.
    """

    name: str
    experts: torch.nn.Module
    scorer: torch.nn.Module


@dataclass(frozen=True, slots=True, eq=False)
class Routers:
    """The routed part of a loaded model.

    Attributes:
        layers: MoE layers in the order in which they run.
        geometry: L, E and top-k, as they ran and as the config says.
        scoring: what a gate probability is; None where it could not be inferred.
    """

    layers: tuple[MoeLayer, ...]
    geometry: ModelGeometry
    scoring: Scoring | None


@contextlib.contextmanager
def listening(layers: Sequence[MoeLayer], listener: Listener) -> Iterator[None]:
    """Tell a listener of all forward passes in the context."""
    with contextlib.ExitStack() as hooks:
        for i, layer in enumerate(layers):
            scorer = layer.scorer.register_forward_hook(_scored_hook(i, listener))
            hooks.callback(scorer.remove)
            experts = layer.experts.register_forward_pre_hook(_chosen_hook(i, layer.name, listener), with_kwargs=True)
            hooks.callback(experts.remove)
        yield


def scores(logits: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Gate probabilities `[T, E]` in float32."""
    logits = logits.float()
    return logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()


def find_routers(model: Any) -> Routers:
    """Find the MoE layers of a transformers model, and let it run a few tokens to see how they route.

    Raises:
        UnsupportedError: a dense model, or an architecture that is built otherwise; naming it and the modules
            that were looked at.
    """
    name = model.config.get_text_config().model_type
    layers = _candidates(model, name)
    probe = _run_probe(model, layers, name)
    _check_all_ran(layers, probe, name)
    order = sorted(range(len(layers)), key=probe.order.index)
    geometry = _geometry(model, probe, name)
    return Routers(tuple(layers[i] for i in order), geometry, _SCORING.get(name) or _inferred(probe))


# --- hooks -----------------------------------------------------------------------------------------------


def _scored_hook(layer: int, listener: Listener) -> Callable[..., None]:
    def hook(_module: object, _arguments: object, output: Any) -> None:
        logits = _logits(output)
        listener.scored(layer, logits.reshape(-1, logits.shape[-1]))

    return hook


def _logits(output: Any) -> Any:
    """Routers return logits, (logits, weights, ids), or (ids, weights, logits)."""
    if not isinstance(output, tuple):
        return output
    return output[0] if output[0].is_floating_point() else output[-1]


def _chosen_hook(layer: int, name: str, listener: Listener) -> Callable[..., None]:
    def hook(_module: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [value for value in (*arguments, *named.values()) if hasattr(value, "is_floating_point")]
        ids = next((tensor for tensor in tensors if _holds_ids(tensor)), None)
        weights = next((t for t in tensors if ids is not None and t is not ids and t.shape == ids.shape), None)
        if ids is None or weights is None:
            raise UnsupportedError(f"{name} is not called with expert ids and weights of [tokens, k]")
        listener.chosen(layer, ids, weights)

    return hook


def _holds_ids(tensor: torch.Tensor) -> bool:
    return bool(tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype.itemsize > 1)


# --- finding ---------------------------------------------------------------------------------------------


def _candidates(model: Any, name: str) -> list[MoeLayer]:
    found = []
    for place, block in model.named_modules():
        children = dict(block.named_children())
        router = next((children[child] for child in _ROUTERS if child in children), None)
        if router is not None and "experts" in children:
            scorer = getattr(router, _SCORER[name]) if name in _SCORER else router
            found.append(MoeLayer(f"{place}.experts", children["experts"], scorer))
    if found:
        return found
    if _configured(model, _EXPERTS_KEYS) in (None, 0, 1):
        raise UnsupportedError(f"{name} is a dense model: there are no experts to count")
    looked_at = [place for place, _ in model.named_modules() if place.endswith(("experts", *_ROUTERS))]
    raise UnsupportedError(
        f"architecture {name}: no module `experts` beside a `gate` or `router`; "
        f"looked at {', '.join(looked_at[:4]) or 'all modules'}. {_ELSEWHERE}"
    )


@dataclass(slots=True, eq=False)
class _Probe:
    """What the layers did with a few tokens, in float32; `order` has a layer once for each time it ran."""

    order: list[int] = field(default_factory=list)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    ids: dict[int, torch.Tensor] = field(default_factory=dict)
    weights: dict[int, torch.Tensor] = field(default_factory=dict)

    def scored(self, layer: int, logits: torch.Tensor) -> None:
        self.logits[layer] = logits.float()

    def chosen(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self.order.append(layer)
        self.ids[layer] = ids.long()
        self.weights[layer] = weights.float()


def _run_probe(model: Any, layers: Sequence[MoeLayer], name: str) -> _Probe:
    import torch

    probe = _Probe()
    tokens = torch.arange(min(_PROBE_TOKENS, model.get_input_embeddings().num_embeddings), device=model.device)
    try:
        with torch.inference_mode(), listening(layers, probe):
            output = model(input_ids=tokens[None], use_cache=True)
    except Exception as error:  # architectures fail in ways of their own, such as for want of another input
        raise UnsupportedError(f"architecture {name}: a text of {len(tokens)} tokens: {error}. {_ELSEWHERE}") from None
    if getattr(output, "past_key_values", None) is None:
        raise UnsupportedError(f"architecture {name} keeps no KV cache. {_ELSEWHERE}")
    return probe


def _check_all_ran(layers: Sequence[MoeLayer], probe: _Probe, name: str) -> None:
    for i, layer in enumerate(layers):
        if (times := probe.order.count(i)) != 1:
            raise UnsupportedError(f"architecture {name}: {layer.name} ran {times} times for one text. {_ELSEWHERE}")
        if i not in probe.logits:
            raise UnsupportedError(f"architecture {name}: the router of {layer.name} was passed by. {_ELSEWHERE}")


def _geometry(model: Any, probe: _Probe, name: str) -> ModelGeometry:
    """L, E and k as they ran; the same in all layers, and as the config says where it says."""
    ran = {(probe.logits[i].shape[-1], probe.ids[i].shape[-1]) for i in probe.order}
    said = (_configured(model, _EXPERTS_KEYS), _configured(model, _TOP_K_KEYS))
    experts, top_k = ran.pop()
    if ran or said[0] not in (None, experts) or said[1] not in (None, top_k):
        raise UnsupportedError(
            f"architecture {name}: layers chose {top_k} of {experts} experts, the config says {said[1]} of {said[0]}, "
            f"other layers: {sorted(ran) or 'alike'}. {_ELSEWHERE}"
        )
    return ModelGeometry(len(probe.order), experts, top_k)


def _configured(model: Any, keys: Sequence[str]) -> int | None:
    config = model.config.get_text_config()
    values = (getattr(config, key, None) for key in keys)
    return next((value for value in values if isinstance(value, int)), None)


def _inferred(probe: _Probe) -> Scoring | None:
    """The one rule to whose scores the weights of all tokens and layers are in proportion."""
    rules: tuple[Scoring, ...] = ("softmax", "sigmoid")
    fitting = [rule for rule in rules if all(_proportional(probe, i, rule) for i in probe.order)]
    return fitting[0] if len(fitting) == 1 else None


def _proportional(probe: _Probe, layer: int, rule: Scoring) -> bool:
    ratios = probe.weights[layer] / scores(probe.logits[layer], rule).gather(1, probe.ids[layer])
    return bool((ratios.amax(1) <= ratios.amin(1) * (1 + _EVEN)).all())
