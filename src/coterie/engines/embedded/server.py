"""A worker's HTTP side: OpenAI's endpoints as vLLM has them, health, load and metrics."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from coterie.engines.embedded.bodies import Call, read_chat, read_completion, read_generate, read_tokenize
from coterie.engines.embedded.generation import Generation
from coterie.engines.embedded.replies import DONE, Choice, Form, Replies, error_body, usage
from coterie.engines.embedded.transfer import FIELD
from coterie.engines.embedded.worker import Worker
from coterie.errors import CoterieError, EngineError, RequestError
from coterie.json_http import JSON, json_reply, metrics_reply

MAX_BODY_BYTES = 8 << 20
_LONG_BYTES = 64 << 10
_EVENTS = "text/event-stream; charset=utf-8"
_MAX_ID = 128
_PREFIXES: dict[Form, str] = {"completion": "cmpl", "chat": "chatcmpl", "tokens": "generate-tokens"}
_TURNS = 8  # of the loop: more than it takes from a closed socket to the end of the answer


class _RefusedError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind, status, param)


def _refusal(error: CoterieError) -> _RefusedError:
    if isinstance(error, RequestError):
        return _RefusedError(400, "BadRequestError", str(error), error.param)
    if isinstance(error, EngineError):
        return _RefusedError(503, "ServiceUnavailableError", str(error))
    return _RefusedError(500, "InternalServerError", str(error))


def app(worker: Worker) -> Starlette:
    """The HTTP side as an ASGI application."""

    async def health(_: Request) -> Response:
        return Response(status_code=200 if worker.engine.problem is None else 503)

    async def load(_: Request) -> Response:
        stats = worker.engine.stats()
        return json_reply({"server_load": stats.running + stats.waiting + stats.loading})

    async def metrics(_: Request) -> Response:
        return metrics_reply(worker.metrics.text())

    async def models(_: Request) -> Response:
        return json_reply({"object": "list", "data": [_model_card(worker)]})

    async def tokenize(request: Request) -> Response:
        model, prompt = read_tokenize(await _body(request))
        _check_model(worker, model)
        tokens = worker.encode(prompt)
        length = worker.engine.config.max_model_len
        return json_reply({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None})

    async def completions(request: Request) -> Response:
        return await _generate(worker, request, read_completion)

    async def chat(request: Request) -> Response:
        return await _generate(worker, request, read_chat)

    async def generate(request: Request) -> Response:
        return await _generate(worker, request, read_generate)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/load", load),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/inference/v1/generate", generate, methods=["POST"]),
        ],
        exception_handlers={
            _RefusedError: _answer_refusal,
            CoterieError: _answer_error,
            HTTPException: _answer_http,
            ClientDisconnect: _answer_nobody,
        },
    )


async def _answer_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, _RefusedError)
    return json_reply(error.body, error.status)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CoterieError)
    return await _answer_refusal(request, _refusal(error))


async def _answer_http(request: Request, error: Exception) -> Response:
    """An unknown path, or a method that it does not take."""
    assert isinstance(error, HTTPException)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    return await _answer_refusal(request, _RefusedError(error.status_code, kind, error.detail))


async def _answer_nobody(_: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client left while it sent


def _model_card(worker: Worker) -> dict[str, Any]:
    return {
        "id": worker.model,
        "object": "model",
        "created": worker.started_s,
        "owned_by": "coterie",
        "root": worker.root,
        "parent": None,
        "max_model_len": worker.engine.config.max_model_len,
    }


def _check_model(worker: Worker, model: str | None) -> None:
    if model not in (None, worker.model):
        raise _RefusedError(
            404, "NotFoundError", f"the model {model[:100]!r} does not exist; {worker.model!r} does", "model"
        )


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise _RefusedError(413, "BadRequestError", f"the body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


# --- completions, chats and token ids -----------------------------------------------------------------------------


async def _generate(worker: Worker, request: Request, read: Callable[[bytes], Call]) -> Response:
    body = await _body(request)
    call = read(body)
    try:
        _check_model(worker, call.model)
        # tokenising a long prompt takes a while, in which other requests go on
        prompts = await asyncio.to_thread(_prompts, worker, call) if len(body) > _LONG_BYTES else _prompts(worker, call)
    except (CoterieError, _RefusedError):
        if call.transfer.remote is not None:  # nobody will fetch it: vLLM, too, has the prefill server free it
            worker.loads.pulls.drop(call.transfer.remote)
        raise
    return _Reply(_Answer(worker, call, prompts, _reply_id(request, call)))


def _reply_id(request: Request, call: Call) -> str:
    """By the client's own id, if it is short and plain."""
    given = request.headers.get("x-request-id", "")
    plain = 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable()
    return f"{_PREFIXES[_form(call)]}-{given if plain else secrets.token_hex(16)}"


def _form(call: Call) -> Form:
    if call.tokens:
        return "tokens"
    return "chat" if call.chat else "completion"


def _prompts(worker: Worker, call: Call) -> list[Sequence[int]]:
    """Tokens of each prompt, which must be those whose KV is fetched, if any is."""
    transfer = call.transfer
    refused = ("prefill", "do_remote_prefill") if transfer.remote else ("decode", "do_remote_decode")
    if (transfer.remote or transfer.keep) and worker.role == refused[0]:
        raise RequestError(f"{FIELD}: this is a {worker.role} worker; it does not take {refused[1]}", FIELD)
    if transfer.keep and call.params.max_tokens != 1:
        raise RequestError(f"{FIELD}: do_remote_decode hands over the prompt alone; set max_tokens to 1", FIELD)
    if transfer.prompt_ids is not None:
        prompts: list[Sequence[int]] = [transfer.prompt_ids]
    elif call.chat:
        prompts = [worker.encode(call.chat)]
    else:
        prompts = [worker.encode(prompt) if isinstance(prompt, str) else prompt for prompt in call.prompts]
    if transfer.remote and transfer.remote.tokens != len(prompts[0]):
        raise RequestError(
            f"{FIELD}: remote_num_tokens is {transfer.remote.tokens}, but the prompt has {len(prompts[0])} tokens",
            FIELD,
        )
    return prompts


class _Answer:
    """Answers one completion or chat request."""

    def __init__(self, worker: Worker, call: Call, prompts: list[Sequence[int]], id_: str) -> None:
        self._call = call
        self._replies = Replies(
            id_,
            worker.model,
            int(time.time()),
            _form(call),
            with_ids=call.return_token_ids,
            with_usage=call.continuous_usage,
        )
        unique = f"{id_}-{secrets.token_hex(4)}"  # a client may send the same id again
        self._generation = Generation(worker, call, prompts, unique)

    async def send(self, client: _Client) -> None:
        """Answer whole or as a stream; cancelled when the client leaves."""
        try:
            async with self._generation as generation:
                await (self._stream(client) if self._call.stream else self._whole(client))
                generation.delivered = True
        except CoterieError as error:
            await client.refuse(_refusal(error))

    async def _whole(self, client: _Client) -> None:
        generation = self._generation
        async for choice, _ in generation.news():
            if problem := _problem(choice):
                await client.refuse(problem)
                return
        if self._call.transfer.keep:
            await _catch_up()
        params = generation.params(generation.choices[0])
        await client.whole(200, JSON, self._replies.full(generation.choices, self._usage(), params))

    async def _stream(self, client: _Client) -> None:
        """Nothing is sent before the first news, so that what fails at once is an error and not an empty stream."""
        async for choice, output in self._generation.news():
            if problem := _problem(choice):
                await client.refuse(problem)
                return
            ids = [] if output.token_id is None else [output.token_id]
            opening = self._replies.opening(choice) if len(choice.token_ids) == len(ids) else b""
            params = self._generation.params(choice) if choice.finish else None
            await client.part(opening + self._replies.news(choice, output.text, ids, params))
        if self._call.include_usage:
            await client.part(self._replies.counts(self._usage()))
        await client.end(DONE)

    def _usage(self) -> dict[str, Any]:
        return usage(self._generation.choices, self._call.n, self._call.transfer.remote_cached)


async def _catch_up() -> None:
    """Let the loop hear what came in during the engine's step: a client that has left would not fetch its KV."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _problem(choice: Choice) -> _RefusedError | None:
    if choice.finish is None or choice.finish.reason != "error":
        return None
    return _RefusedError(500, "InternalServerError", choice.finish.problem or "the request failed")


# --- to the client ----------------------------------------------------------------------------------------


class _Client:
    """The sending side of one HTTP exchange."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False

    async def whole(self, status: int, media_type: str, body: bytes) -> None:
        """A reply of known length."""
        await self._start(status, media_type, [(b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body})

    async def part(self, data: bytes) -> None:
        """A part of a stream."""
        if not self._started:
            await self._start(200, _EVENTS, [])
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """The last part of a stream."""
        await self.part(data)
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, refusal: _RefusedError) -> None:
        """An error; in a stream that has begun, as its last event."""
        body = msgspec.json.encode(refusal.body)
        if self._started:
            await self.end(b"data: " + body + b"\n\n" + DONE)
        else:
            await self.whole(refusal.status, JSON, body)

    async def _start(self, status: int, media_type: str, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        headers = [(b"content-type", media_type.encode()), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


class _Reply(Response):
    """Sends an answer, and cancels it when the client leaves."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        answering = asyncio.ensure_future(self._answer.send(_Client(send)))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.wait((answering, leaving))
        if not answering.cancelled():
            answering.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
