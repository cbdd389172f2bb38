"""What the gateway needs of an engine: pure functions between bytes and values, no sockets.

The gateway owns connections, deadlines and cancellation.  An engine knows which requests its servers
understand, how the prefill server's reply names the KV it holds, and how to hand that to a decode server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from coterie.core import ExpertCounts, Reading
from coterie.engines.large import NOTHING_LARGE, Large
from coterie.engines.pieces import Pieces

Fields = dict[str, msgspec.Raw]
"""A JSON object with its values unread: what coterie does not know passes through byte for byte."""

Body = bytes | Pieces
"""A body for a worker, in pieces where it is large."""


class Call(msgspec.Struct, frozen=True, eq=False):
    """A client's request, read as far as routing needs.

    Attributes:
        path: the API path it was posted to.
        fields: its body, without the fields that clients may not set.
        stream: whether the client asked for server-sent events.
        output_tokens: the client's limit on output tokens; None if it gave none.
        prompt: raw JSON of the prompt or messages.
        prefill_only: whether its answer is at most one token, which the prefill server has when the prompt is done.
        undividable: why the call cannot be split into prefill and decode, in a fixed phrase; None if it can.
        large: what was cut out of the fields and the prompt, to be put back in what is sent on.
    """

    path: str
    fields: Fields
    stream: bool
    output_tokens: int | None
    prompt: bytes
    prefill_only: bool
    undividable: str | None
    large: Large = NOTHING_LARGE

    @property
    def prompt_bytes(self) -> int:
        """Length of the prompt's JSON."""
        return len(self.large.completed(self.prompt))

    @property
    def prompt_is_cut(self) -> bool:
        """Whether `prompt` is only how the prompt begins."""
        return self.prompt_bytes > len(self.prompt)


class Handoff(msgspec.Struct, frozen=True, eq=False):
    """What a prefill server's reply says: where the KV waits, and which experts the prompt used.

    Attributes:
        params: the engine's own transfer parameters, opaque and whole, without coterie's envelopes.
        prompt_tokens: tokens of the prompt, by the engine's count; 0 where it does not say.
        envelope: the counts envelope, unread; None where the engine sent none.
        large: what was cut out of the parameters, to be put back in what is sent on.
        counts: the envelope's counts, where the engine took them out of it.
    """

    params: Fields
    prompt_tokens: int
    envelope: msgspec.Raw | None
    large: Large = NOTHING_LARGE
    counts: bytes = b""


class Prefilled(msgspec.Struct, frozen=True, eq=False):
    """A prefill server's reply, read.

    Attributes:
        handoff: the KV that waits for a decode server; None where the server keeps none.
        ended: whether the output ended with its first token, so that the reply is the whole answer.
    """

    handoff: Handoff | None
    ended: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer to a client.

    Attributes:
        content_type: of the body.
        body: JSON, or server-sent events.
    """

    content_type: bytes
    body: bytes


class Transcript(Protocol):
    """What of a stream has come so far, kept so that another worker can go on with it.

    Attributes:
        call: what its next decode worker is asked: the client's request, or the rest of it, and whatever is needed to
            follow the stream.
        complete: whether no token of the output is missing; what closes the stream may be.
        closed: whether the stream's last event has come.
    """

    call: Call
    closed: bool

    @property
    def complete(self) -> bool:
        """See the class."""
        ...

    def add(self, event: bytes) -> bytes:
        """Take in the next event, without the empty line that ends it.

        Returns:
            What the client is sent, likewise; nothing where the client has it already.

        Raises:
            EngineError: the worker gives up, or sends what is not the rest of this stream.
        """
        ...

    def resume(self) -> Call:
        """The request for what is missing; the events that follow are those of its decode worker.

        Raises:
            UnresumableError: nobody can go on with this stream.
        """
        ...

    def closing(self) -> list[bytes]:
        """The events that are missing of a stream whose output is complete, as `add` takes them."""
        ...


class Engine(Protocol):
    """One engine's dialect of disaggregated serving."""

    @property
    def paths(self) -> frozenset[str]:
        """API paths whose requests can be dispatched, split or not."""
        ...

    @property
    def health_path(self) -> str:
        """Path that answers 200 when a server can take requests."""
        ...

    @property
    def metrics_path(self) -> str:
        """Path that shows a server's metrics."""
        ...

    @property
    def settings_path(self) -> str:
        """Path that shows a server's settings, where the operator lets it."""
        ...

    @property
    def models_path(self) -> str:
        """Path that lists the models a server has."""
        ...

    def parse(self, path: str, body: bytes, large: Large = NOTHING_LARGE) -> Call:
        """Read a client's request.

        Args:
            path: one of `paths`.
            body: JSON.
            large: what was cut out of the body.

        Raises:
            RequestError: the body is not a JSON object, a field that coterie reads has a wrong type, or the client asks
                for what split servers cannot give.
        """
        ...

    def probe(self, model: str) -> Call:
        """A minimal request for `model`, to see whether a server can do its part."""
        ...

    def prefill_body(self, call: Call) -> Body:
        """Body for the prefill server: compute the prompt's KV and keep it."""
        ...

    def prefilled(self, reply: bytes, large: Large = NOTHING_LARGE) -> Prefilled:
        """Read the prefill server's reply.

        Args:
            reply: JSON.
            large: what was cut out of it.

        Raises:
            EngineError: the reply is not the engine's.
        """
        ...

    def handoff(self, reply: bytes, large: Large = NOTHING_LARGE) -> Handoff:
        """The KV that the prefill server's reply names; as `prefilled`.

        Raises:
            EngineError: as `prefilled`; or the reply names no KV to hand over.
        """
        ...

    def answer(self, call: Call, reply: bytes) -> Answer:
        """The prefill server's reply as the client's own answer, in the form that the client asked for.

        Raises:
            RequestError: what the client says of that form cannot be read.
            EngineError: the reply is not one answer.
        """
        ...

    def counts(self, handoff: Handoff) -> ExpertCounts | None:
        """Experts that the prompt used; None where the engine sent no envelope.

        Raises:
            WireError: the envelope does not follow its format.
        """
        ...

    def decode_body(self, call: Call, handoff: Handoff | None) -> Body:
        """Body for the decode server: the client's own fields, and the handoff if there is one."""
        ...

    def why_unresumable(self, call: Call, *, sampled: bool) -> str | None:
        """Why another worker could not go on with the call's stream; None if it could.

        Args:
            call: the client's request.
            sampled: whether an output that chance has a part in may go on.
        """
        ...

    def transcript(self, call: Call, limit_tokens: int) -> Transcript:
        """The transcript of a stream, for a call that `why_unresumable` has nothing against.

        Args:
            call: the client's request.
            limit_tokens: most tokens of the prompt, and of the output, to be ready to go on with.
        """
        ...

    def refusal(self, handoff: Handoff) -> tuple[str, Body]:
        """Path and body of a request that a decode server answers with 404, having the prefill server free the handoff.

        It costs neither of them anything, but has this effect only where the two have exchanged KV before.
        """
        ...

    def release_body(self, call: Call, handoff: Handoff) -> Body:
        """Body for a decode server that makes the prefill server free a handoff nobody will decode."""
        ...

    def reading(self, reply: bytes) -> Reading:
        """What a reply of `metrics_path` says of the server's load.

        Raises:
            EngineError: a figure is not there, or is none.
        """
        ...

    def fetched_tokens(self, reply: bytes) -> float:
        """Tokens whose KV a server has fetched from others, by a reply of `metrics_path`.

        Raises:
            EngineError: the figure is not there, or is none.
        """
        ...

    def on_lost_kv(self, reply: bytes) -> str | None:
        """What a server does when it cannot fetch KV: "fail" or "recompute", by a reply of `settings_path`.

        None where the reply does not say.
        """
        ...

    def model_ids(self, reply: bytes) -> list[str]:
        """Names of the models in a reply of `models_path`.

        Raises:
            EngineError: the reply is not a list of models.
        """
        ...
