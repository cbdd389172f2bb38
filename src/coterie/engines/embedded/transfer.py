"""`kv_transfer_params`: what vLLM with NIXL, coterie's plugin for it, and this engine say about KV and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from coterie.engines.embedded.messages import MAX_BLOCKS, RemoteKv
from coterie.engines.embedded.request import ASKED, Asked, KeptBlocks
from coterie.errors import RequestError, WireError
from coterie.wire import PROMPT_KEY

FIELD = "kv_transfer_params"

_Block = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Blocks = Annotated[list[_Block], msgspec.Meta(max_length=MAX_BLOCKS)]
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]


class _Params(msgspec.Struct):
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    prompt_token_ids: _TokenIds | None = None
    remote_block_ids: Annotated[list[_Blocks], msgspec.Meta(min_length=1, max_length=1)] | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    remote_prefill_cached_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    tp_size: int | None = 1
    coterie: msgspec.Raw = msgspec.Raw(b"null")  # an envelope that a router passed on asks for nothing


_decoder = msgspec.json.Decoder(_Params)


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a request says about KV and counts.

    Attributes:
        keep: whether the prompt's KV is kept for a decode worker (`do_remote_decode`).
        remote: where the prompt's KV waits (`do_remote_prefill`); None to compute it here.
        asked: whether counts, or counts and output ids, are wanted.
        remote_cached: tokens of the prompt that the prefill worker found in its cache; None where it does not say.
        prompt_ids: the prompt's tokens, which then is not tokenised; None where it does not say.
    """

    keep: bool = False
    remote: RemoteKv | None = None
    asked: Asked | None = None
    remote_cached: int | None = None
    prompt_ids: tuple[int, ...] | None = None


def read_transfer(raw: bytes) -> Transfer:
    """Read a request's `kv_transfer_params`; fields that this engine does not know are left to others.

    Raises:
        RequestError: a field is missing, of the wrong type or out of range.
    """
    try:
        params = _decoder.decode(raw)
        remote = _read_remote(params) if params.do_remote_prefill else None
    except (msgspec.MsgspecError, RecursionError, WireError) as error:
        raise RequestError(f"{FIELD}: {error}", FIELD) from None
    if params.do_remote_prefill and params.do_remote_decode:
        raise RequestError(f"{FIELD}: do_remote_prefill and do_remote_decode exclude one another", FIELD)
    ids = None if params.prompt_token_ids is None else tuple(params.prompt_token_ids)
    cached = params.remote_prefill_cached_tokens if remote else None
    return Transfer(bool(params.do_remote_decode), remote, _read_asked(params.coterie), cached, ids)


def _read_remote(params: _Params) -> RemoteKv:
    values = {
        name: getattr(params, f"remote_{name}")
        for name in ("host", "port", "engine_id", "request_id", "block_ids", "num_tokens")
    }
    if missing := [f"remote_{name}" for name, value in values.items() if value is None]:
        raise WireError(f"do_remote_prefill needs {', '.join(missing)}")
    if params.tp_size != 1:
        raise WireError(f"tp_size is {params.tp_size}; this engine takes KV of one rank")
    blocks, tokens = values.pop("block_ids"), values.pop("num_tokens")
    return RemoteKv(**values, blocks=tuple(blocks[0]), tokens=tokens)


def _read_asked(raw: msgspec.Raw) -> Asked | None:
    value = msgspec.json.decode(raw)
    if not isinstance(value, str):
        return None
    for asked in ASKED:
        if value == asked:
            return asked
    raise RequestError(f"{FIELD}: {PROMPT_KEY} must be one of {', '.join(ASKED)}, got {value[:40]!r}", FIELD)


def handoff_params(
    request_id: str,
    kept: KeptBlocks,
    cached: int,
    engine_id: str,
    address: tuple[str, int],
    envelopes: Mapping[str, Any],
) -> dict[str, Any]:
    """What a prefill worker's reply says: `kv_transfer_params` for the decode worker, and the counts.

    `cached` tokens of the prompt were in the prefill worker's cache; the decode worker's reply tells the client so.
    """
    host, port = address
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(kept.blocks)],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "remote_num_tokens": kept.tokens,
        "remote_prefill_cached_tokens": cached,
        "tp_size": 1,
        **envelopes,
    }
