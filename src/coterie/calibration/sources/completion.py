"""What the sources that ask an OpenAI-compatible server have in common: request, usage, and what is refused."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from coterie.calibration.client import EngineClient
from coterie.calibration.prompts import Prompt
from coterie.core import ExpertCounts
from coterie.errors import EngineError, UnsupportedError

_PLUGIN = (
    '--kv-transfer-config \'{"kv_connector": "CountsConnector", "kv_role": "kv_both", '
    '"kv_connector_module_path": "coterie.vllm_plugin.connector"}\''
)


class ServerSource:
    """The part of a `Source` that is alike for all servers: the connection, and the model's name.

    Args:
        client: connection to the server; closed with the source.
        model: name of the model; None takes the server's only one.
    """

    def __init__(self, client: EngineClient, model: str | None) -> None:
        self._client = client
        self._model = model

    async def model(self) -> str:
        """See `Source`."""
        if self._model is None:
            self._model = await self._client.only_model()
        return self._model

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


def used_tokens(reply: dict[str, Any], name: str, server: str) -> int:
    """A number of tokens by the reply's `usage`: `prompt_tokens` or `completion_tokens`.

    Raises:
        EngineError: the reply does not say.
    """
    usage = reply.get("usage")
    tokens = usage.get(name) if isinstance(usage, dict) else None
    if type(tokens) is not int or tokens < 0:
        raise EngineError(f"{server} did not say in its usage how many {name} there were")
    return tokens


def check_covered(prompt: ExpertCounts, remedy: str) -> None:
    """Refuse counts of a prompt of which nothing was counted.

    Raises:
        EngineError: with the remedy.
    """
    if not prompt.covered:
        raise EngineError(f"none of the prompt's {prompt.tokens} tokens were counted: {remedy}")


def no_experts(server: str, why: str) -> UnsupportedError:
    """The error for a server that says nothing of experts, with both ways to start one that does."""
    return UnsupportedError(
        f"{server} returned no {why}; start vLLM with {_PLUGIN}, or start vLLM or SGLang with "
        "--enable-return-routed-experts and collect with --routed-experts --model-config FOLDER"
    )
