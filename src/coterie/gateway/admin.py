"""The admin side: health, metrics, workers, decisions and configuration, on a port of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coterie.gateway.gateway import Gateway
from coterie.gateway.workers import Fleet
from coterie.routing import Shown


def admin_app(gateway: Gateway) -> Starlette:
    """The admin side as an ASGI application; it reads the gateway and changes nothing."""

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok" if gateway.ready else "unavailable"}, 200 if gateway.ready else 503)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(gateway.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def workers(_: Request) -> Response:
        return JSONResponse({"workers": [*_rows(gateway.prefill), *_rows(gateway.decode)]})

    async def decisions(_: Request) -> Response:
        return JSONResponse({"decisions": gateway.dispatcher.decisions.entries()})

    async def policies(_: Request) -> Response:
        return JSONResponse({"policies": [_policy(fleet) for fleet in (gateway.prefill, gateway.decode)]})

    async def config(_: Request) -> Response:
        return JSONResponse(
            {**dataclasses.asdict(gateway.config), "decode_policy": gateway.config.resolved_decode_policy}
        )

    endpoints = (health, metrics, workers, decisions, policies, config)
    return Starlette(routes=[Route(f"/{endpoint.__name__}", endpoint) for endpoint in endpoints])


def _policy(fleet: Fleet) -> dict[str, Any]:
    policy = fleet.policy
    figures: dict[str, float] = policy.figures(fleet.clock.now()) if isinstance(policy, Shown) else {}
    return {"role": fleet.role, "name": None if policy is None else policy.name, "figures": figures}


def _rows(fleet: Fleet) -> Iterator[dict[str, Any]]:
    for state in fleet.ledger.states():
        worker = fleet.workers[state.name]
        yield {
            "name": state.name,
            "role": fleet.role,
            "url": worker.url,
            "available": state.available,
            "problem": worker.problem,
            "transfer": dataclasses.asdict(worker.transfer) if fleet.role == "decode" else None,
            "requests": state.requests,
            "tokens": state.tokens,
            "reading": None if state.reading is None else dataclasses.asdict(state.reading),
            "connections": len(worker.pool.connections),
        }
