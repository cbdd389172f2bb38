"""Counts from a stock server that returns routed experts: vLLM or SGLang, told apart by their replies.

Both return one row of expert ids for every token that was forwarded (all but the last output token) and every
hidden layer:

- vLLM, started with `--enable-return-routed-experts`: `choices[0].routed_experts`, a base64 `.npy`
  (https://github.com/vllm-project/vllm/pull/45635).
- SGLang, started with the flag of the same name and asked by `return_routed_experts`: `sglext.routed_experts`
  of the reply, or of its `meta_info`, base64 of raw int32 (https://github.com/sgl-project/sglang/pull/12162).

A token whose row holds an expert twice, such as an all-zero row, was not recorded: it counts as not covered.
"""

from __future__ import annotations

from typing import Any

from coterie.activations import TraceRecord
from coterie.calibration.client import EngineClient
from coterie.calibration.prompts import Prompt
from coterie.calibration.sources.completion import ServerSource, check_covered, greedy_body, no_experts, used_tokens
from coterie.core import ExpertCounts, ModelGeometry
from coterie.errors import EngineError, InputError, WireError
from coterie.model_config import ModelConfig
from coterie.wire import Ids, count_ids, read_some_routed_experts, recorded_tokens


class RoutedSource(ServerSource):
    """A `Source`: counts the ids of the prompt and of the output, and keeps those of the output.

    Args:
        client: connection to the server; closed with the source.
        config: where the model's MoE layers are.
        model: name of the model; None takes the server's only one.

    Attributes:
        records: see `Source`; names the MoE layers, since another configuration would read other rows.
    """

    def __init__(self, client: EngineClient, config: ModelConfig, model: str | None = None) -> None:
        super().__init__(client, model)
        self._config = config
        where = ", ".join(str(layer) for layer in config.moe_layers)
        self.records = f"counts and ids from routed experts of {config.geometry} (hidden layers {where})"

    async def record(self, prompt: Prompt, max_tokens: int) -> TraceRecord:
        """See `Source`."""
        body = {**greedy_body(await self.model(), prompt, max_tokens), "return_routed_experts": True}
        try:
            return self._read(await self._client.post(prompt.path, body), prompt)
        except InputError as error:
            raise EngineError(
                f"{prompt.where}: {self._client.server} answered with routed experts that do not fit the model "
                f"configuration ({self._config.geometry}, {self._config.hidden_layers} hidden layers): {error}"
            ) from None
        except EngineError as error:
            raise EngineError(f"{prompt.where}: {error}") from None

    def _read(self, reply: dict[str, Any], prompt: Prompt) -> TraceRecord:
        server, config = self._client.server, self._config
        payload = _routed_experts(reply)
        if payload is None:
            raise no_experts(server, "routed experts")
        ids = read_some_routed_experts(
            payload, config.geometry, model_layers=config.hidden_layers, moe_layers=config.moe_layers
        )
        prompt_tokens = used_tokens(reply, "prompt_tokens", server)
        output_tokens = used_tokens(reply, "completion_tokens", server)
        if len(ids) != prompt_tokens + output_tokens - 1:
            raise WireError(
                f"{len(ids)} rows for {prompt_tokens} prompt and {output_tokens} output tokens, of which the last "
                "is never forwarded"
            )
        counts, _ = _count(ids[:prompt_tokens], config.geometry)
        check_covered(
            counts, "the server did not record their experts; start it anew, without a KV cache on disk or host"
        )
        output, output_ids = _count(ids[prompt_tokens:], config.geometry)
        return TraceRecord(counts, output, output_tokens, prompt.hash, prompt.label, output_ids)


def _routed_experts(reply: dict[str, Any]) -> object:
    """The ids where either engine puts them, or None."""
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    for holder in (choice, reply.get("sglext"), reply.get("meta_info")):
        if isinstance(holder, dict) and holder.get("routed_experts") is not None:
            return holder["routed_experts"]
    return None


def _count(ids: Ids, geometry: ModelGeometry) -> tuple[ExpertCounts, Ids]:
    """Counts of the recorded tokens among `[tokens, L, top_k]`, and their ids."""
    recorded = ids[recorded_tokens(ids)]
    return ExpertCounts(geometry, count_ids(recorded, geometry.experts), len(ids), len(recorded)), recorded
