"""The simulator decides as the gateway does.

One trace goes through the gateway, whose workers' connections are replaced by simulated engines and whose time is the
simulation's, and once more through `sim`.  All that the policies were shown and all that they decided must be equal:
requests, the states of the workers, decisions, in this order.  Work beside the decisions takes simulated time in both.
"""

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest
from msgspec import structs

from coterie import wire
from coterie.calibration import fit
from coterie.core import RouteRequest, prompt_hash
from coterie.engines.vllm_nixl import VllmNixl
from coterie.gateway.config import GatewayConfig
from coterie.gateway.edge.http1 import ResponseHead
from coterie.gateway.edge.reply import Reply
from coterie.gateway.edge.request import Request
from coterie.gateway.gateway import Gateway
from coterie.gateway.legs.upstream import UpstreamError
from coterie.latency import StepTime, TokenTime
from coterie.routing import DECODE_POLICIES, Background, Watcher, make_policy
from coterie.sim import Change, ClusterSpec, Population, Stream, population_of, simulate
from coterie.sim.background import BackgroundWork
from coterie.sim.cluster import new_prefill_worker, task_of
from coterie.sim.decode import DecodeGroup
from coterie.sim.kernel import Kernel, Priority
from coterie.sim.workload import arrivals
from made_traces import domains_differ

SEED = 7
SPEC = ClusterSpec(
    2, 4, step_time=StepTime(4e-3, 1e-4, 1e-5), prefill_time=TokenTime(0.02, 1e-4), batch_requests=4, notice_s=0.2
)
TRAFFIC = Stream(90, 1.5, burstiness=0.3)
CHANGES = (
    Change(0.4, "decode-2", "lost"),
    Change(0.7, "prefill-1", "lost"),
    Change(0.8, "decode-2", "joined"),
    Change(1.2, "prefill-1", "joined"),
)


def asked(i):
    """Prompt of a request: a prompt's text, of which the population's hash and prefix are made as the gateway does."""
    return f"prompt {i % 20}"


def make_population(trace):
    recorded = population_of(trace)
    requests = [
        structs.replace(
            request,
            prompt_hash=prompt_hash(asked(i)),
            prefix=json.dumps(asked(i)).encode(),
            domain=request.domain.replace(" ", "-"),
        )
        for i, request in enumerate(recorded.requests)
    ]
    return Population(tuple(requests), recorded.experts)


TRACE = replace(domains_differ(40), labels=tuple(f"domain-{i % 4}" for i in range(40)))
POPULATION = make_population(domains_differ(40))
PROFILE = fit(TRACE, 4, starts=1, pairs=100)


def policies(decode):
    return {
        "prefill": make_policy("prefix", SPEC.targets("prefill")),
        "decode": make_policy(decode, SPEC.targets("decode"), profile=PROFILE, trace=TRACE),
    }


class Recorded:
    """A policy that keeps what it was shown and what it said; all else it passes on."""

    def __init__(self, role, policy, log):
        self.name, self.reads = policy.name, policy.reads
        self._role, self._policy, self._log = role, policy, log
        self._watcher = policy if isinstance(policy, Watcher) else None

    def leased(self, lease, now_s):
        if self._watcher is not None:
            self._watcher.leased(lease, now_s)

    def released(self, lease, served, now_s):
        if self._watcher is not None:
            self._watcher.released(lease, served, now_s)

    def due(self, workers, now_s):
        return self._policy.due(workers, now_s) if isinstance(self._policy, Background) else None

    def install(self, outcome, now_s):
        self._policy.install(outcome, now_s)

    def choose(self, request: RouteRequest, workers, rng):
        decision = self._policy.choose(request, workers, rng)
        seen = (request.id, request.prompt_tokens, request.output_tokens, request.domain, request.prefix)
        self._log.append((self._role, seen, tuple(workers), decision))
        return decision


# --- the gateway on simulated engines ---


class Client:
    """The client's side of a reply."""

    full = False

    def write(self, *parts):
        pass

    def abort(self):
        pass


class Connection:
    """What the gateway's relay asks of the connection that a reply comes from."""

    framing = None


class SimulatedPool:
    """Instead of the connections to one worker: a simulated engine that answers when its task has ended."""

    def __init__(self, replay, worker, *, prefill):
        self.replay, self.worker, self.prefill = replay, worker, prefill

    async def post(self, target, headers, body, consumer, patience):
        consumer.sent = True
        arrival = self.replay.arrivals[int(headers.partition(b"x-request-id: ")[2].partition(b"\r\n")[0])]
        if not self.prefill and arrival.number in self.replay.decoding:
            answer(consumer, 404, b"{}")  # the release of a handoff that nobody will decode
            return
        if not self.prefill:
            self.replay.decoding.add(arrival.number)
        task = await self.replay.until_done(self.worker, arrival)
        if task is None:
            raise UpstreamError("the worker was lost", "closed")
        if self.prefill:
            answer(consumer, 200, self.reply(arrival.request))
        else:
            self.replay.clock.stream(consumer, task)

    def reply(self, request):
        params = {"do_remote_prefill": True, "remote_request_id": "x", "remote_block_ids": [[1]]}
        params["coterie"] = wire.encode_counts(request.counts)
        return json.dumps({"usage": {"prompt_tokens": request.prompt_tokens}, "kv_transfer_params": params}).encode()

    def expire(self, now):
        pass

    def close(self):
        pass


def answer(consumer, status, body):
    head = ResponseHead(status, ((b"content-length", b"%d" % len(body)),), False, len(body), True)
    consumer.on_head(head, Connection())
    consumer.on_body(body)
    consumer.on_end()


class Hindsight:
    """The kernel's clock; set back while a reply begins that is here whole only now."""

    def __init__(self, kernel):
        self.kernel, self.shown_s = kernel, None

    def now(self):
        return self.kernel.now() if self.shown_s is None else self.shown_s

    def stream(self, consumer, task):
        consumer.on_head(ResponseHead(200, ((b"content-type", b"text/event-stream"),), True, None, True), Connection())
        self.shown_s = task.first_token_s
        consumer.on_body(b"data: {}\n\n")
        self.shown_s = None
        consumer.on_body(b"data: {}\n\n" * (task.output_tokens - 1) + b"data: [DONE]\n\n")
        consumer.on_end()


class Replay:
    """A gateway whose time is that of a kernel: after each event it runs until it waits for the next one."""

    def __init__(self, decode, log):
        urls = {
            role: tuple(f"http://{role}-{i}:1" for i in range(getattr(SPEC, role))) for role in ("prefill", "decode")
        }
        # the simulator knows neither retries nor breakers
        config = GatewayConfig(
            **urls,
            seed=SEED,
            keep_decisions=0,
            log_requests=False,
            retries=0,
            breaker_failures=10**6,
            request_timeout_s=1e9,
        )
        self.kernel = Kernel()
        self.clock = Hindsight(self.kernel)
        self.gateway = Gateway(config, VllmNixl(), self.clock)
        self.arrivals, self.decoding, self.waiting, self.tasks = {}, set(), set(), []
        self.engines = {}
        for fleet, policy in zip((self.gateway.prefill, self.gateway.decode), policies(decode).values(), strict=True):
            fleet.policy = Recorded(fleet.role, policy, log)
            for worker in fleet.workers.values():
                self.engines[worker.name] = self.new_engine(fleet.role)
                worker.pool = SimulatedPool(self, self.engines[worker.name], prefill=fleet.role == "prefill")
                fleet.set_problem(worker, "unhealthy", None)

    def new_engine(self, role):
        if role == "prefill":
            return new_prefill_worker(self.kernel, SPEC)
        return DecodeGroup(self.kernel, SPEC, POPULATION.experts).ranks[0]

    async def run(self):
        BackgroundWork(self.kernel, self.gateway.decode.policy, self.gateway.decode.ledger)
        for change in CHANGES:
            self.kernel.at(change.time_s, Priority.CHANGE, self.change, change)
        self.feed(arrivals(POPULATION, TRAFFIC, SEED))
        while self.kernel.step():
            await self.settle()
        self.gateway.stop()

    async def settle(self):
        """Let the gateway run until every request is over or waits for an engine."""
        background = self.gateway.dispatcher.handoffs.background
        while sum(not task.done() for task in self.tasks) > len(self.waiting) or background:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def feed(self, rest):
        if arrival := next(rest, None):
            self.kernel.at(arrival.time_s, Priority.ARRIVAL, self.arrive, arrival, rest)

    def arrive(self, arrival, rest):
        self.arrivals[arrival.number] = arrival
        request = arrival.request
        body = {"model": "m", "prompt": json.loads(request.prefix), "max_tokens": request.output_tokens}
        headers = [(b"x-request-id", request.id.encode()), (b"x-coterie-domain", request.domain.encode())]
        path = "/v1/completions"
        posted = Request("POST", path.encode(), path, headers, json.dumps(body).encode())
        self.tasks.append(asyncio.ensure_future(self.gateway.handle(posted, Reply(posted, Client()))))
        self.feed(rest)

    def until_done(self, engine, arrival):
        future = asyncio.get_running_loop().create_future()
        self.waiting.add(future)
        engine.submit(task_of(arrival, partial(self.end, future)))
        return future

    def end(self, future, task, done):
        self.waiting.discard(future)
        future.set_result(task if done else None)

    def change(self, change):
        fleet = self.gateway.prefill if change.worker.startswith("prefill") else self.gateway.decode
        worker, engine = fleet.workers[change.worker], self.engines[change.worker]
        if change.kind == "joined":
            engine.revive()
            fleet.set_problem(worker, "unhealthy", None)
            return
        engine.lose()
        self.kernel.after(SPEC.notice_s, Priority.CHANGE, fleet.set_problem, worker, "unhealthy", "lost")


def of_gateway(decode):
    """What its policies saw and said, and the time of the last event."""

    async def run():
        log = []
        replay = Replay(decode, log)
        await replay.run()
        assert all(task.result() is None for task in replay.tasks)
        return log

    return asyncio.run(run())


def of_simulator(decode):
    log = []
    recorded = {role: Recorded(role, policy, log) for role, policy in policies(decode).items()}
    row = simulate(POPULATION, TRAFFIC, SPEC, **recorded, seed=SEED, changes=CHANGES)
    return log, row


@pytest.mark.parametrize("decode", DECODE_POLICIES)
def test_gateway_and_simulator_show_policies_the_same_and_so_decide_alike(decode):
    log, row = of_simulator(decode)
    assert of_gateway(decode) == log
    assert sum(role == "decode" for role, *_ in log) > 80
    assert row.failed > 5  # the lost workers were in use
    assert max(state.requests for _, _, workers, _ in log for state in workers) > 5


def test_centroids_are_refitted_to_the_pool_while_the_two_are_compared():
    decode = policies("locality_refit")["decode"]
    simulate(
        POPULATION, TRAFFIC, SPEC, prefill=policies("locality")["prefill"], decode=decode, seed=SEED, changes=CHANGES
    )
    figures = decode.figures(1.5)
    assert figures["refits_installed_total"] >= 1
    assert figures["refits_outdated_total"] >= 1  # the pool changed while a job ran
    assert figures["centroids"] == 4
