"""Counts from a vLLM server that runs coterie's plugin."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from coterie.activations import TraceRecord
from coterie.calibration.client import EngineClient
from coterie.calibration.prompts import Prompt
from coterie.core import ExpertCounts
from coterie.errors import EngineError, InputError, UnsupportedError
from coterie.wire import OUTPUT_KEY, PROMPT_KEY, decode_counts

_PLUGIN = (
    '--kv-transfer-config \'{"kv_connector": "CountsConnector", "kv_role": "kv_both", '
    '"kv_connector_module_path": "coterie.vllm_plugin.connector"}\''
)


class PluginSource:
    """A `Source`: asks for counts of prompt and output in `kv_transfer_params`, and reads both envelopes.

    Args:
        client: connection to the server; closed with the source.
        model: name of the model; None takes the server's only one.
    """

    records = "counts by the plugin"

    def __init__(self, client: EngineClient, model: str | None = None) -> None:
        self._client = client
        self._model = model

    async def model(self) -> str:
        """See `Source`."""
        if self._model is None:
            self._model = await self._client.only_model()
        return self._model

    async def record(self, prompt: Prompt, max_tokens: int) -> TraceRecord:
        """See `Source`."""
        body = {
            **greedy_body(await self.model(), prompt, max_tokens),
            "kv_transfer_params": {PROMPT_KEY: "counts"},
        }
        server = self._client.server
        try:
            return _read(await self._client.post(prompt.path, body), prompt, server)
        except InputError as error:
            raise EngineError(f"{prompt.where}: {server} answered with damaged counts: {error}") from None
        except EngineError as error:
            raise EngineError(f"{prompt.where}: {error}") from None

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, traceback)


def greedy_body(model: str, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    """Body of a request whose output depends on model and prompt alone, and has `max_tokens` tokens."""
    return {"model": model, **prompt.fields, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def output_length(reply: dict[str, Any], server: str) -> int:
    """Tokens generated, by the reply's `usage`.

    Raises:
        EngineError: the reply does not say.
    """
    usage = reply.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if type(tokens) is not int:
        raise EngineError(f"{server} did not say how many tokens it generated")
    return tokens


def _read(reply: dict[str, Any], prompt: Prompt, server: str) -> TraceRecord:
    envelopes = reply.get("kv_transfer_params") or {}
    if not isinstance(envelopes, dict) or not envelopes.keys() >= {PROMPT_KEY, OUTPUT_KEY}:
        raise UnsupportedError(
            f"{server} returned no expert counts: it does not run coterie's plugin; start vLLM with {_PLUGIN}"
        )
    counts = decode_counts(envelopes[PROMPT_KEY])
    _check_covered(counts)
    output = decode_counts(envelopes[OUTPUT_KEY])
    return TraceRecord(counts, output, output_length(reply, server), prompt.hash, prompt.label)


def _check_covered(prompt: ExpertCounts) -> None:
    if not prompt.covered:
        raise EngineError(
            f"none of the prompt's {prompt.tokens} tokens were counted: their KV came from outside the engine; "
            "collect from an engine without KV offloading"
        )
