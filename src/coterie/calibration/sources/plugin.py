"""Counts from a vLLM server that runs coterie's plugin."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.activations import TraceRecord
from coterie.calibration.client import EngineClient
from coterie.calibration.prompts import Prompt
from coterie.calibration.sources.completion import ServerSource, check_covered, greedy_body, no_experts, used_tokens
from coterie.core import ExpertCounts
from coterie.errors import EngineError, InputError, WireError
from coterie.wire import (
    ASK_COUNTS,
    ASK_IDS,
    OUTPUT_IDS_KEY,
    OUTPUT_KEY,
    PROMPT_KEY,
    Ids,
    count_ids,
    decode_counts,
    read_routed_experts,
)


class PluginSource(ServerSource):
    """A `Source`: asks for counts of prompt and output in `kv_transfer_params`, and reads both envelopes.

    Args:
        client: connection to the server; closed with the source.
        model: name of the model; None takes the server's only one.
        ids: ask for the expert ids of each output token as well.

    Attributes:
        records: see `Source`.
    """

    def __init__(self, client: EngineClient, model: str | None = None, *, ids: bool = False) -> None:
        self.records = "counts and ids by the plugin" if ids else "counts by the plugin"
        super().__init__(client, model)
        self._ask = ASK_IDS if ids else ASK_COUNTS

    async def record(self, prompt: Prompt, max_tokens: int) -> TraceRecord:
        """See `Source`."""
        body = {
            **greedy_body(await self.model(), prompt, max_tokens),
            "kv_transfer_params": {PROMPT_KEY: self._ask},
        }
        server = self._client.server
        try:
            return self._read(await self._client.post(prompt.path, body), prompt)
        except InputError as error:
            raise EngineError(f"{prompt.where}: {server} answered with damaged counts: {error}") from None
        except EngineError as error:
            raise EngineError(f"{prompt.where}: {error}") from None

    def _read(self, reply: dict[str, Any], prompt: Prompt) -> TraceRecord:
        server, found = self._client.server, reply.get("kv_transfer_params") or {}
        if not isinstance(found, dict) or not found.keys() >= {PROMPT_KEY, OUTPUT_KEY}:
            raise no_experts(server, "expert counts: it does not run coterie's plugin")
        counts, output = decode_counts(found[PROMPT_KEY]), decode_counts(found[OUTPUT_KEY])
        check_covered(counts, "their KV came from outside the engine; collect from an engine without KV offloading")
        ids = _read_ids(found, output) if self._ask == ASK_IDS else None
        length = used_tokens(reply, "completion_tokens", server)
        return TraceRecord(counts, output, length, prompt.hash, prompt.label, ids)


def _read_ids(found: dict[str, Any], output: ExpertCounts) -> Ids:
    if found.get(OUTPUT_IDS_KEY) is None:
        raise EngineError(
            "the plugin returned no ids of the output: after a preemption it cannot always (the engine's log says "
            "why); run again with a lower --concurrency, what is finished is kept"
        )
    ids = read_routed_experts(found[OUTPUT_IDS_KEY], output.geometry)
    if not np.array_equal(count_ids(ids, output.geometry.experts), output.counts):
        raise WireError("the ids of the output do not add up to its counts")
    return ids
