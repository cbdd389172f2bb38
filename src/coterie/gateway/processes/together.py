"""The admin side of a gateway of several processes: each is asked, and the answers are put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

import msgspec
from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coterie.gateway.admin.answering import HANDLERS, error_reply, routes_of
from coterie.gateway.admin.peers import peer_operations
from coterie.gateway.config import GatewayConfig
from coterie.gateway.peers.exchange import Exchange
from coterie.gateway.processes.control import Answer
from coterie.json_http import bounded_body, json_reply, metrics_reply

MAX_BODY_BYTES = 1 << 20

Said = Mapping[int, Any]
"""What each process answered, by its number."""


class Asked(Protocol):
    """A process that can be asked."""

    async def ask(self, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes) -> Answer | None:
        """Have its admin side answer; None if it does not."""
        ...


class Together(Protocol):
    """The processes of a gateway; see `parent.Group`."""

    config: GatewayConfig
    restarts: list[int]
    changing: asyncio.Lock

    @property
    def starting(self) -> Set[int]:
        """Numbers of those that do not serve yet."""
        ...

    @property
    def members(self) -> Mapping[int, Asked]:
        """Those that live, by number."""
        ...


def together_app(group: Together, exchange: Exchange | None = None) -> Starlette:
    """The admin side as an ASGI application.

    Args:
        group: the processes.
        exchange: the gateway's part in the exchange with peers, if it has any.
    """
    own = [] if exchange is None else routes_of(peer_operations(exchange))

    async def answer(request: Request) -> Response:
        body = await bounded_body(request, MAX_BODY_BYTES)
        if request.method in ("GET", "HEAD"):
            answers = await _ask_all(group, request, body)
        else:
            async with group.changing:
                if group.starting:  # it would miss the change that the others make
                    return error_reply(
                        503, f"process {min(group.starting)} is starting; ask again", "unavailable_error"
                    )
                answers = await _ask_all(group, request, body)
        if not answers:
            return error_reply(503, "no process answers", "unavailable_error")
        path = request.scope["path"]
        if path == "/health":
            return _first(answers, lambda answer: answer.status == 200)
        refused = [answer for answer in answers.values() if answer.status >= 400]
        if refused:
            return _response(refused[0])
        if path == "/metrics":
            return metrics_reply(_metrics(group, exchange, answers))
        if request.method != "GET" or path not in _MERGED:
            return _first(answers, lambda _: True)  # all have made the same change, or tell the same
        said = {number: msgspec.json.decode(answer.body) for number, answer in answers.items()}
        return json_reply(_MERGED[path](said, group.config))

    everything = Route("/{path:path}", answer, methods=["GET", "POST", "PUT", "DELETE"])
    return Starlette(routes=[*own, everything], exception_handlers=HANDLERS)


async def _ask_all(group: Together, request: Request, body: bytes) -> dict[int, Answer]:
    """The answers of those that answer, by number."""
    path, query = request.scope["raw_path"].decode("latin-1"), request.scope["query_string"].decode("latin-1")
    target = f"{path}?{query}" if query else path
    headers = [(name, value) for name, value in request.headers.raw if name != b"content-length"]
    members = dict(sorted(group.members.items()))
    answers = await asyncio.gather(*(one.ask(request.method, target, headers, body) for one in members.values()))
    return {number: answer for number, answer in zip(members, answers, strict=True) if answer is not None}


def _first(answers: Mapping[int, Answer], wanted: Callable[[Answer], bool]) -> Response:
    return _response(next(filter(wanted, answers.values()), next(iter(answers.values()))))


def _response(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers[:] = answer.headers
    return response


# --- JSON ---

_STATES = ("gone", "available", "drained", "draining", "leaving", "unavailable")
"""Of a worker, those that others come before."""


def _workers(said: Said, config: GatewayConfig) -> Any:
    """Load is the same to all processes but for moments; connections are added up; the first problem counts."""
    rows: dict[str, dict[str, Any]] = {}
    for one in said.values():
        for row in one["workers"]:
            known = rows.setdefault(row["name"], row)
            if known is not row:
                known["connections"] += row["connections"]
                known["available"] = known["available"] and row["available"]
                known["problem"] = known["problem"] or row["problem"]
                known["state"] = max(known["state"], row["state"], key=_STATES.index)
    return {"workers": list(rows.values())}


def _decisions(said: Said, config: GatewayConfig) -> Any:
    """The last ones of all processes, oldest first."""
    entries = [{**entry, "process": number} for number, one in said.items() for entry in one["decisions"]]
    entries.sort(key=lambda entry: float(entry["time"]))
    return {"decisions": entries[max(0, len(entries) - config.keep_decisions) :]}


def _policies(said: Said, config: GatewayConfig) -> Any:
    return {"policies": [{**row, "process": number} for number, one in said.items() for row in one["policies"]]}


def _config(said: Said, config: GatewayConfig) -> Any:
    return next(iter(said.values()))


_MERGED: Mapping[str, Callable[[Said, GatewayConfig], Any]] = {
    "/workers": _workers,
    "/decisions": _decisions,
    "/policies": _policies,
    "/config": _config,
}


# --- metrics ---


def _metrics(group: Together, exchange: Exchange | None, answers: Mapping[int, Answer]) -> bytes:
    """All series of all processes with the label `process`: a sum would fall when one is started again."""
    families: dict[str, Metric] = {}
    for number, answer in answers.items():
        for family in text_string_to_metric_families(answer.body.decode()):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [_labelled(sample, number) for sample in family.samples]
    of_peers = () if exchange is None else exchange.collect()
    return generate_latest(_Families([*families.values(), *_of_group(group, answers), *of_peers]))


def _labelled(sample: Sample, number: int) -> Sample:
    return sample._replace(labels={**sample.labels, "process": str(number)})


def _of_group(group: Together, answers: Mapping[int, Answer]) -> Iterator[Metric]:
    up = GaugeMetricFamily("coterie_process_up", "1 if the process answers.", labels=["process"])
    restarts = CounterMetricFamily("coterie_process_restarts", "Times it was started again.", labels=["process"])
    for number, times in enumerate(group.restarts):
        up.add_metric([str(number)], float(number in answers))
        restarts.add_metric([str(number)], times)
    yield from (up, restarts)


class _Families:
    """What `generate_latest` needs of a registry."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families
