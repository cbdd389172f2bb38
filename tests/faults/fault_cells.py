"""The fault matrix: each worker fault at each moment of a request, and what became of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from fault_cluster import PATIENCE_S, PROMPTS, ROLES, Answer, FaultCluster, FaultEngine
from fault_proxy import Behaviour, Moment, Stop, Trap, Tunnel, babble, dawdle, hang, refuse, reset

from waiting import wait_until

BEHAVIOURS: dict[str, Behaviour] = {
    "hung": hang,
    "slow": dawdle,
    "500s": refuse(500),
    "502s": refuse(502),
    "503s": refuse(503),
    "reset": reset,
    "garbage": babble,
}
"""Faults of completions alone: the worker's health is good throughout."""

PROCESS_FAULTS = ("killed", "restarted", "stopped")
FAULTS = (*PROCESS_FAULTS, *BEHAVIOURS)

_SENT = "the status goes out with the reply's head"
IMPOSSIBLE = {
    ("500s", Moment.MIDST): _SENT,
    ("502s", Moment.MIDST): _SENT,
    ("503s", Moment.MIDST): _SENT,
    ("503s", Moment.WAITING): "a worker that declines has not begun",
}
"""Cells that cannot exist, and why."""


@dataclass(frozen=True)
class Cell:
    """One fault.

    Attributes:
        role: of the worker that fails.
        fault: one of `FAULTS`.
        moment: where the request is then.
    """

    role: str
    fault: str
    moment: Moment

    def __str__(self) -> str:
        return f"{self.role} {self.fault} {self.moment.value}"


CELLS = [
    Cell(role, fault, moment)
    for role in ROLES for fault in FAULTS for moment in Moment if (fault, moment) not in IMPOSSIBLE
]  # fmt: skip


def right_ends(cell: Cell) -> set[str]:
    """How the requests of a cell may end.

    All are served, and to the letter, with one exception: a worker's own 500 may be the request's fault, so it is
    passed on, until there have been so many in a row that it must be the worker's.
    """
    return {"served", "500"} if cell.fault == "500s" else {"served"}


MOST_500S = 3
"""Failures in a row after which a worker is not asked: the gateway's default."""


@dataclass
class Found:
    """What became of a cell.

    Attributes:
        cell: which.
        ends: of the requests that met the fault; after BEFORE, one of several does.
        later: ends of those after them that were not served, until the gateway knew the worker for broken.
        stall_s: the longest pause that a client of the first requests saw.
        settle_s: from the fault until a whole round of requests was served without a stall, the worker still broken.
        back_s: from the worker's mending until the gateway used it again.
        idle_s: from then until no load was counted and no engine held KV.
    """

    cell: Cell
    ends: list[str] = field(default_factory=list)
    later: list[str] = field(default_factory=list)
    stall_s: float = 0.0
    settle_s: float = 0.0
    back_s: float = 0.0
    idle_s: float = 0.0


def end_of(answer: Answer, text: str) -> str:
    """How a request ended: "served", the status or code of a clear error, "cut", or "wrong".

    Args:
        answer: what its client got.
        text: what an undisturbed client gets.
    """
    if not text.startswith(answer.text):
        return "wrong"
    if not answer.whole:
        return "cut"
    if answer.error is not None:
        return answer.error if answer.status == 200 else str(answer.status)
    return "served" if answer.text == text else "wrong"


class Matrix:
    """Runs cells on one cluster.

    Args:
        cluster: a healthy one, for whose greedy texts the engines are asked at first.
    """

    def __init__(self, cluster: FaultCluster) -> None:
        self.cluster = cluster
        self.texts = {prompt: cluster.ask(prompt).text for prompt in PROMPTS}

    def ends(self, answers: Sequence[Answer], prompts: Sequence[str]) -> list[str]:
        """How each request ended, see `end_of`."""
        return [end_of(answer, self.texts[prompt]) for answer, prompt in zip(answers, prompts, strict=True)]

    def run(self, cell: Cell) -> Found:
        """Break, ask, mend, and see that nothing is left."""
        self._earn_retries()
        found = Found(cell)
        victim, start_s, answers = self._meet(cell)
        found.ends = self.ends(answers, self._prompts(cell)[: len(answers)])
        found.stall_s = max(answer.gap_s for answer in answers)
        self._settle(cell, found, start_s)
        mended_s = self._mend(victim, cell.fault)
        wait_until(self.cluster.all_available, what=f"the return of {victim.name}")
        found.back_s = time.monotonic() - mended_s
        found.idle_s = wait_until(self.cluster.nothing_held, what="the end of all load")
        return found

    def _earn_retries(self) -> None:
        """Send requests that go well: retries are a fifth of all, and here one cell of failures follows another."""
        self.cluster.ask_all([PROMPTS[0]] * 20, tokens=1)

    def _meet(self, cell: Cell) -> tuple[FaultEngine, float, list[Answer]]:
        """Let requests meet the fault; the engine that failed, when, and what the clients got."""
        if cell.moment is not Moment.BEFORE:
            return self._catch(cell)
        victim, start_s = self.cluster.engines[cell.role][0], time.monotonic()
        self._break(victim, cell.fault)
        return victim, start_s, self.cluster.ask_all(self._prompts(cell))

    def _catch(self, cell: Cell) -> tuple[FaultEngine, float, list[Answer]]:
        trap = Trap(cell.moment, self._act(cell.fault))
        with self.cluster.lying_in_wait(cell.role, trap), ThreadPoolExecutor(1) as client:
            asked = client.submit(self.cluster.ask, PROMPTS[0])
            victim, start_s = self.cluster.engine(trap.caught.result(10).name), time.monotonic()
            if cell.fault == "restarted":
                victim.restart()
            return victim, start_s, [asked.result()]

    def _settle(self, cell: Cell, found: Found, start_s: float) -> None:
        """Ask until the fault costs no client anything any more."""
        prompts = self._prompts(cell) * 2

        def settled() -> bool:
            answers = self.cluster.ask_all(prompts)
            lost = [end for end in self.ends(answers, prompts) if end != "served"]
            found.later += lost
            return not lost and max(answer.gap_s for answer in answers) < PATIENCE_S / 2

        wait_until(settled, what="a round without a loss")
        found.settle_s = time.monotonic() - start_s

    def _prompts(self, cell: Cell) -> list[str]:
        return list(PROMPTS[: len(self.cluster.engines[cell.role])])

    def _break(self, engine: FaultEngine, fault: str) -> None:
        if fault in BEHAVIOURS:
            engine.proxy.behaviour = BEHAVIOURS[fault]
        elif fault == "stopped":
            engine.process.signal(signal.SIGSTOP)
        else:
            engine.kill()
            if fault == "restarted":
                engine.restart()

    def _act(self, fault: str) -> Behaviour:
        """What breaks the engine that a trap has caught, in the proxies' thread."""

        async def act(tunnel: Tunnel) -> None:
            engine = self.cluster.engine(tunnel.proxy.name)
            if fault in BEHAVIOURS:
                tunnel.proxy.behaviour = BEHAVIOURS[fault]
                await BEHAVIOURS[fault](tunnel)
            elif fault == "stopped":
                engine.process.signal(signal.SIGSTOP)
            else:
                tunnel.proxy.shut()
                engine.process.signal(signal.SIGKILL)
                raise Stop

        return act

    def _mend(self, engine: FaultEngine, fault: str) -> float:
        """Make the engine well; when it was."""
        if fault in BEHAVIOURS:
            engine.proxy.mend()
        elif fault == "stopped":
            engine.process.signal(signal.SIGCONT)
        elif fault == "killed":
            engine.restart()
        return time.monotonic()
