"""vLLM with its NIXL connector in pull mode: completions, chats, and `/inference/v1/generate` (token ids in and out).

The prefill server gets the client's request with one output token and `do_remote_decode`; its reply names
the KV blocks it keeps for 30 s (vLLM's `kv_lease_duration`).  A decode server that gets the client's request with that
name pulls the blocks and continues.  So the decode server can be chosen after the prompt's experts are
known, which is where routing by experts belongs.

Both legs must see the same prompt and agree on the first token, so the prefill leg keeps whatever shapes either.
Only limits of length are changed.  `min_tokens` is at most 1 there: with 0 the first token could end an output
that must go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from coterie import wire
from coterie.core import ExpertCounts, Reading
from coterie.decoding import UNREADABLE
from coterie.engines import vllm_envelope, vllm_resume
from coterie.engines.base import Answer, Body, Call, Fields, Handoff, Prefilled, Transcript
from coterie.engines.large import NOTHING_LARGE, Large
from coterie.engines.vllm_answers import CHAT, GENERATE, answer
from coterie.errors import EngineError, InputError, RequestError

COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True)
class _Dialect:
    """Where a path's requests say what.

    Attributes:
        prompt: field of the prompt.
        limits: fields that limit the output; the first that is set counts.
        sampling: field of the object that holds those and the other sampling fields; None where the body does.
        divides: whether prefill and decode can be told apart.
    """

    prompt: str
    limits: tuple[str, ...]
    sampling: str | None = None
    divides: bool = True


_DIALECTS = {
    COMPLETIONS: _Dialect("prompt", ("max_tokens",)),
    CHAT: _Dialect("messages", ("max_completion_tokens", "max_tokens")),
    GENERATE: _Dialect("token_ids", ("max_tokens",), sampling="sampling_params"),
    RESPONSES: _Dialect("input", ("max_output_tokens",), divides=False),
    MESSAGES: _Dialect("messages", ("max_tokens",), divides=False),
}

_PARAMS = "kv_transfer_params"
_NOT_FOR_CLIENTS = ("kv_transfer_params", "ec_transfer_params", "bootstrap_", "routed_")
"""Fields that steer KV transfer and placement: a client could crash a scheduler with them or read KV of others."""

_XARGS = "vllm_xargs"
_EXTRA_ARGS = "extra_args"
"""vLLM keeps `kv_transfer_params` itself in the latter, of the sampling fields, and puts the former's entries there,
without looking at their names."""

_ROUTED_EXPERTS = ("routed_experts_prompt_start", "return_routed_experts")
"""What vLLM and SGLang call the wish for the experts of each token."""

_NO_MODEL = "coterie/releases-a-handoff"

_KV_USAGE = b"vllm:kv_cache_usage_perc"
_WAITING = b"vllm:num_requests_waiting_by_reason"
_FETCHED = b"vllm:external_prefix_cache_hits_total"
_FOR_ROOM = b'reason="capacity"'
"""The other reason, "deferred", holds those whose KV is on its way: in a decode server nearly all that wait."""

_MINIMA = ("min_tokens", "min_completion_tokens")

_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")
_ASK_PREFILL = msgspec.Raw(
    msgspec.json.encode(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )
)

_T = TypeVar("_T")
_object = msgspec.json.Decoder(Fields)
_optional_bool = msgspec.json.Decoder(bool | None)
_optional_int = msgspec.json.Decoder(int | None)
_optional_str = msgspec.json.Decoder(str | None)
_optional_object = msgspec.json.Decoder(Fields | None)
_one_prompt = msgspec.json.Decoder(tuple[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _PrefillReply(msgspec.Struct):
    kv_transfer_params: Fields | None = None
    usage: _Usage | None = None
    choices: list[_Choice] = []


class _TransferConfig(msgspec.Struct):
    kv_load_failure_policy: str | None = None


class _ServerConfig(msgspec.Struct):
    kv_transfer_config: _TransferConfig | None = None


class _ServerInfo(msgspec.Struct):
    vllm_config: _ServerConfig


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_prefill_reply = msgspec.json.Decoder(_PrefillReply)
_models = msgspec.json.Decoder(_Models)
_server_info = msgspec.json.Decoder(_ServerInfo)


def kv_transfer_config(role: Literal["prefill", "decode"], *, kv_buffer_device: str | None = None) -> str:
    """JSON for vLLM's `--kv-transfer-config`.

    Prefill servers run the counts connector beside NIXL, as children of vLLM's own MultiConnector; decode
    servers run NIXL alone.  A failed KV read fails the request: it is never answered from wrong KV.

    Args:
        role: which part the server plays.
        kv_buffer_device: NIXL's buffer device, such as "cpu"; vLLM's default for the platform if not given.
    """
    nixl: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    if kv_buffer_device is not None:
        nixl["kv_buffer_device"] = kv_buffer_device
    if role == "decode":
        return _encode(nixl).decode()
    counts = {
        "kv_connector": "CountsConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "coterie.vllm_plugin.connector",
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": [nixl, counts]},
    }
    return _encode(both).decode()


class VllmNixl:
    """The `Engine` of vLLM + NIXL pull."""

    paths = frozenset(_DIALECTS)
    health_path = "/health"
    metrics_path = "/metrics"
    models_path = "/v1/models"
    settings_path = "/server_info?config_format=json"  # answers with VLLM_SERVER_DEV_MODE=1 only

    def parse(self, path: str, body: bytes, large: Large = NOTHING_LARGE) -> Call:
        """Read a client's request; see `Engine.parse`."""
        dialect = _DIALECTS[path]
        fields = _without_steering(_read_object(body), _XARGS)
        sampling = fields if dialect.sampling is None else _read_sampling(fields, dialect.sampling)
        _read(fields, "model", _optional_str)
        stream = _read(fields, "stream", _optional_bool)
        limits = [_read_limit(sampling, name) for name in dialect.limits]
        limit = next((limit for limit in limits if limit is not None), None)
        prompt = bytes(fields.get(dialect.prompt, b""))
        only = dialect.divides and limit is not None and limit <= 1
        undividable = _why_undividable(path, sampling, prompt)
        return Call(path, fields, bool(stream), limit, prompt, only, undividable, large)

    def probe(self, model: str) -> Call:
        """A one-token completion of a prompt of a few tokens, less than a block."""
        return self.parse(COMPLETIONS, _encode({"model": model, "prompt": "Hello, how are you?", "max_tokens": 1}))

    def prefill_body(self, call: Call) -> Body:
        """The client's fields, cut to one output token in one piece, whatever limits the client set."""
        return call.large.completed(_encode(self._prefill_fields(call)))

    def _prefill_fields(self, call: Call) -> Fields:
        fields = call.fields.copy()
        fields.pop("stream_options", None)
        name = _DIALECTS[call.path].sampling
        if name is None:
            _cut(fields)
        else:
            sampling = _object.decode(fields[name])
            _cut(sampling)
            fields[name] = msgspec.Raw(_encode(sampling))
        fields["stream"] = _FALSE
        if _PARAMS in fields:
            fields[_PARAMS] = msgspec.Raw(_encode(_with_prompt(call, _object.decode(_ASK_PREFILL))))
        else:
            fields[_PARAMS] = _ASK_PREFILL
        return fields

    def prefilled(self, reply: bytes, large: Large = NOTHING_LARGE) -> Prefilled:
        """Read the prefill server's reply; see `Engine.prefilled`."""
        short, counts = vllm_envelope.cut_out(reply)
        read = _read_prefill_reply(short)
        if counts and not vllm_envelope.lacks_counts((read.kv_transfer_params or {}).get(wire.PROMPT_KEY)):
            counts, read = b"", _read_prefill_reply(reply)  # they were something else's
        ended = len(read.choices) == 1 and read.choices[0].finish_reason == "stop"
        params = read.kv_transfer_params
        if not params:
            return Prefilled(None, ended)
        envelope = params.pop(wire.PROMPT_KEY, None)
        params.pop(wire.OUTPUT_KEY, None)
        tokens = read.usage.prompt_tokens if read.usage else 0
        return Prefilled(Handoff(params, tokens, envelope, large, counts), ended)

    def handoff(self, reply: bytes, large: Large = NOTHING_LARGE) -> Handoff:
        """The KV that the prefill server's reply names; see `Engine.handoff`."""
        handoff = self.prefilled(reply, large).handoff
        if handoff is None:
            raise EngineError(
                "the prefill reply carries no kv_transfer_params: start the server with --kv-transfer-config "
                "and a PD connector"
            )
        return handoff

    def answer(self, call: Call, reply: bytes) -> Answer:
        """The prefill server's reply as the client's own answer; see `Engine.answer`."""
        return answer(call, reply)

    def counts(self, handoff: Handoff) -> ExpertCounts | None:
        """Read the counts envelope; see `Engine.counts`."""
        envelope = handoff.envelope
        return None if envelope is None else vllm_envelope.read_counts(envelope, handoff.counts)

    def decode_body(self, call: Call, handoff: Handoff | None) -> Body:
        """The client's own fields, and the opaque transfer parameters."""
        if handoff is None:
            return call.large.completed(_encode(call.fields))
        return _with_handoff(call, call.fields, handoff)

    def why_unresumable(self, call: Call, *, sampled: bool) -> str | None:
        """See `Engine.why_unresumable`."""
        if call.path not in (COMPLETIONS, CHAT):
            return f"it is a request of {call.path}"
        return vllm_resume.why_unresumable(call, sampled=sampled)

    def transcript(self, call: Call, limit_tokens: int) -> Transcript:
        """See `Engine.transcript`."""
        return vllm_resume.VllmTranscript(call, limit_tokens, chat=call.path == CHAT)

    def refusal(self, handoff: Handoff) -> tuple[str, Body]:
        """A completion by a model that no server has: vLLM tells the prefill server of what it does not let in.

        The prompt is not empty, since a body that is wrong in itself is refused before vLLM looks at the handoff.
        """
        body = {"model": _NO_MODEL, "prompt": "x", "max_tokens": 1, _PARAMS: handoff.params}
        return COMPLETIONS, handoff.large.completed(_encode(body))

    def release_body(self, call: Call, handoff: Handoff) -> Body:
        """The real request with one output token: pulling the KV is what makes the prefill server free it."""
        return _with_handoff(call, self._prefill_fields(call), handoff)

    def reading(self, reply: bytes) -> Reading:
        """Read a reply of `/metrics`; of several engines in one server the fullest, and the sum of their queues."""
        usage = [value for _, value in _samples(reply, _KV_USAGE)]
        waiting = [value for labels, value in _samples(reply, _WAITING) if _FOR_ROOM in labels]
        if not usage or not waiting:
            missing = (_WAITING if usage else _KV_USAGE).decode()
            raise EngineError(f"the metrics do not show {missing}")
        try:
            return Reading(max(usage), round(sum(waiting)))
        except (InputError, ValueError, OverflowError) as error:
            raise EngineError(f"the metrics cannot be right: {error}") from None

    def fetched_tokens(self, reply: bytes) -> float:
        """Read a reply of `/metrics`; see `Engine.fetched_tokens`."""
        samples = [value for _, value in _samples(reply, _FETCHED)]
        if not samples:
            raise EngineError(f"the metrics do not show {_FETCHED.decode()}")
        return sum(samples)

    def on_lost_kv(self, reply: bytes) -> str | None:
        """Read a reply of `/server_info`; see `Engine.on_lost_kv`."""
        try:
            transfer = _server_info.decode(reply).vllm_config.kv_transfer_config
        except UNREADABLE:
            return None
        return transfer.kv_load_failure_policy if transfer else None

    def model_ids(self, reply: bytes) -> list[str]:
        """Read a reply of `/v1/models`; see `Engine.model_ids`."""
        try:
            return [model.id for model in _models.decode(reply).data]
        except UNREADABLE as error:
            raise EngineError(f"the list of models cannot be read: {error}") from None


def _with_prompt(call: Call, params: Fields) -> Fields:
    """Transfer parameters, with the tokens that stand for a chat's messages where a call goes on with a stream."""
    own = call.fields.get(_PARAMS)
    return params if own is None else {**params, **_object.decode(own)}


def _read_prefill_reply(reply: bytes) -> _PrefillReply:
    try:
        return _prefill_reply.decode(reply)
    except UNREADABLE as error:
        raise EngineError(f"the prefill reply cannot be read: {error}") from None


def _with_handoff(call: Call, fields: Fields, handoff: Handoff) -> Body:
    body = _encode({**fields, _PARAMS: _with_prompt(call, handoff.params)})
    return (call.large | handoff.large).completed(body)


def _samples(reply: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Labels and value of each sample of a metric in Prometheus' text format."""
    for line in reply.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] == b"{":
            labels, _, value = line[len(name) + 1 :].rpartition(b"} ")
            try:
                yield labels, float(value)
            except ValueError:
                raise EngineError(f"the metrics cannot be read: {line[:200]!r}") from None


def _read_object(body: bytes) -> Fields:
    try:
        return _object.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(f"the body must be a JSON object: {error}") from None
    except UNREADABLE as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def _without_steering(fields: Fields, extra: str) -> Fields:
    """The fields that clients may set, those in the object `extra` included.

    Raises:
        RequestError: experts of each token are asked for.  Those of the prompt are at the prefill server and those of
            the output at the decode server, and vLLM's NIXL servers return neither.
    """
    for name in _ROUTED_EXPERTS:
        if name in fields and bytes(fields[name]) not in (b"null", b"false"):
            raise RequestError(
                f"{name}: split servers cannot return the experts of each token; ask a server that does both", name
            )
    kept = _strip(fields)
    inner = _read(kept, extra, _optional_object)
    if inner and len(allowed := _strip(inner)) < len(inner):
        kept[extra] = msgspec.Raw(_encode(allowed))
    return kept


def _read_sampling(fields: Fields, name: str) -> Fields:
    """The object of sampling fields; without what clients may not set, there and in `fields`."""
    given = _read(fields, name, _optional_object)
    if given is None:
        raise RequestError(f"{name}: must be an object", name)
    allowed = _without_steering(given, _EXTRA_ARGS)
    fields[name] = msgspec.Raw(_encode(allowed))
    return allowed


def _strip(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if not name.startswith(_NOT_FOR_CLIENTS)}


def _cut(sampling: Fields) -> None:
    """Set limits to one output token."""
    if "max_completion_tokens" in sampling:
        sampling["max_completion_tokens"] = _ONE
    sampling.pop("best_of", None)
    sampling["max_tokens"] = _ONE
    sampling["n"] = _ONE
    for name in _MINIMA:
        if bytes(sampling.get(name, b"0")) not in (b"0", b"null"):
            sampling[name] = _ONE


def _read(fields: Fields, name: str, decoder: msgspec.json.Decoder[_T]) -> _T | None:
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return decoder.decode(raw)
    except UNREADABLE as error:
        raise RequestError(f"{name}: {error}", name) from None


def _read_limit(fields: Fields, name: str) -> int | None:
    limit = _read(fields, name, _optional_int)
    if limit is not None and limit < 0:
        raise RequestError(f"{name}: must not be negative, got {limit}", name)
    return limit


def _why_undividable(path: str, sampling: Fields, prompt: bytes) -> str | None:
    """Requests whose KV one handoff cannot stand for: the decode server computes their prompts itself.

    vLLM's reply names the KV of one sequence, for one consumer.  Prompt log-probabilities exist only where the
    prompt is computed.  A prompt that is cut to what the output leaves room for differs between the legs.
    """
    if not _DIALECTS[path].divides:
        return "path"
    for name, why in _UNDIVIDABLE.items():
        if name in sampling and (said := why(sampling, name)) is not None:
            return said
    if path == COMPLETIONS and _several_prompts(prompt):
        return "several prompts in one request"
    return None


def _more_than_one(sampling: Fields, name: str) -> str | None:
    value = _read(sampling, name, _optional_int)
    return f"{name} > 1" if value is not None and value > 1 else None


def _is_set(why: str) -> Callable[[Fields, str], str | None]:
    return lambda sampling, name: why if _read(sampling, name, _optional_bool) else None


def _is_given(sampling: Fields, name: str) -> str | None:
    return None if bytes(sampling[name]) == b"null" else "prompt_logprobs"


def _is_negative(sampling: Fields, name: str) -> str | None:
    return f"{name} < 0" if bytes(sampling[name]).startswith(b"-") else None


_UNDIVIDABLE: Mapping[str, Callable[[Fields, str], str | None]] = {
    "n": _more_than_one,
    "best_of": _more_than_one,
    "use_beam_search": _is_set("beam search"),
    "prompt_logprobs": _is_given,
    "prompt_logprob_token_ids": _is_given,
    "echo": _is_set("echo"),
    "truncate_prompt_tokens": _is_negative,
}
"""Sampling fields for which a request may not be divided, and what finds out why."""


def _several_prompts(prompt: bytes) -> bool:
    start = prompt[:64].lstrip()
    # A list that opens with a digit is one prompt of token ids, which may be a million of them.
    if not start.startswith(b"[") or start[1:].lstrip()[:1].isdigit():
        return False
    try:
        _one_prompt.decode(prompt)  # stops at the second, however many follow
    except msgspec.ValidationError:
        return True
    return False
