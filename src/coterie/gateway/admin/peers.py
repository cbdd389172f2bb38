"""The admin side of the exchange with gateways of other hosts: they post what they hold, and operators look."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from coterie.errors import InputError
from coterie.gateway.admin import api
from coterie.gateway.admin.openapi import Operation
from coterie.gateway.peers.exchange import PATH, Exchange, Link
from coterie.gateway.peers.heard import View
from coterie.gateway.peers.message import MAX_MESSAGE_BYTES, MEDIA, Message, Taken, read_message
from coterie.json_http import json_reply


def peer_operations(exchange: Exchange | None) -> tuple[Operation, ...]:
    """What the admin side does for peers.

    Args:
        exchange: this gateway's part; None if it has none, or another process has it.
    """
    admin = _Peers(exchange)
    return (
        Operation("GET", PATH, "The exchange with other gateways", admin.peers, {200: api.Peers}, (409,)),
        Operation(
            "POST",
            PATH,
            "What another gateway holds",
            admin.hear,
            {200: Taken},
            (409,),
            Message,
            media=MEDIA,
            read=read_message,
            max_bytes=MAX_MESSAGE_BYTES,
        ),
    )


class _Peers:
    """The handlers."""

    def __init__(self, exchange: Exchange | None) -> None:
        self._exchange = exchange

    async def peers(self, request: Request, body: None) -> Response:
        exchange = self._required()
        now_s = exchange.now()
        views = {identity: _view(view, now_s) for identity, view in exchange.heard.views.items()}
        rows = [_row(link, views, now_s) for link in exchange.links]
        names = exchange.names()
        others = [view for identity, view in views.items() if identity not in names]
        return json_reply(api.Peers(exchange.identity, rows, others))

    async def hear(self, request: Request, body: Message) -> Response:
        return json_reply(self._required().hear(body))

    def _required(self) -> Exchange:
        if self._exchange is None:
            raise InputError("this gateway exchanges nothing with others; start it with --peer")
        return self._exchange


def _view(view: View, now_s: float) -> api.PeerView:
    return api.PeerView(
        view.identity,
        round(now_s - view.heard_s, 3),
        view.sequence,
        view.requests,
        view.tokens,
        view.unknown_workers,
    )


def _row(link: Link, views: dict[str, api.PeerView], now_s: float) -> api.PeerRow:
    told_ago_s = None if link.told_s is None else round(now_s - link.told_s, 3)
    view = None if link.identity is None else views.get(link.identity)
    return api.PeerRow(link.name, link.url, link.identity, link.problem, told_ago_s, view)
