"""Every interleaving of clients, servers and a sweeper over a few slots, each of them cut off at any step.

The actors run `coterie.experts.protocol.rules` itself.  A shared step (a load, a swap, half of a payload, a question
whether somebody is alive) pauses the function that makes it: `Shared` raises `Pause` at the first step that its log has
no result for.  So an actor's local state is the stage that it is in and the log of the steps of that stage, and the
world is a value that can be compared, stored, and stepped on in every way.

What is checked:

- safety, at every step: a client takes the whole reply to the very request that it waits for, or none; no two clients
  use a slot; a client gives up only if somebody died or a time-out struck;
- whatever a client writes to its slot that does not follow the rules (a vandal), no function fails, and the next client
  of this slot gets its reply;
- progress, at the end: from every world that can be reached, the actors alone, without further deaths and time-outs,
  can get to where every living client has its reply or has failed, no slot is owned, and no dead server's segment is
  left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from coterie.errors import WireError
from coterie.experts.protocol import rules
from coterie.experts.protocol.rules import NOBODY, State, Word

PLACE = {Word.STATE: 0, Word.OWNER: 1, "claimed": 2}  # of a slot's words; the last is only there for a wrong rule
REQUEST, REPLY = 3, 4  # places of the payloads, two halves each
EMPTY = ((0, None), (0, None))
TORN = (0, "torn")  # half of a request whose bytes are none


class Pause(Exception):  # noqa: N818 - no error
    def __init__(self, step: tuple[Any, ...]) -> None:
        self.step = step


class Shared:
    """What an actor can do that others notice."""

    def __init__(self, log: tuple[Any, ...]) -> None:
        self._log = iter(log)

    def do(self, *step: Any) -> Any:
        for result in self._log:
            return result
        raise Pause(step)

    def alive(self, actor: int) -> bool:
        return self.do("alive", actor)


class PausingSlot:
    """A `Slot`."""

    def __init__(self, shared: Shared, segment: int, slot: int) -> None:
        self.at, self.shared = (segment, slot), shared

    def load(self, word):
        return self.shared.do("load", *self.at, PLACE[word])

    def swap(self, word, expected, new):
        return self.shared.do("swap", *self.at, PLACE[word], expected, new)

    def store(self, word, new):
        """For wrong rules."""
        self.shared.do("store", *self.at, PLACE[word], new)

    def write_request(self, sequence, request):
        self.shared.do("write", *self.at, REQUEST, ((sequence, request), (sequence, request)))

    def read_request(self):
        (sequence, one), (_, other) = self.shared.do("read", *self.at, REQUEST)
        if TORN[1] in (one, other):
            raise WireError("torn")
        return sequence, (one, other)

    def write_reply(self, sequence, reply):
        self.shared.do("write", *self.at, REPLY, ((sequence, reply), (sequence, reply)))

    def read_reply(self):
        (sequence, one), (_, other) = self.shared.do("read", *self.at, REPLY)
        return sequence, (one, other)


@dataclass(frozen=True)
class Rules:
    """The rules under test; tests replace single ones by wrong ones."""

    claim: Callable = rules.claim
    post: Callable = rules.post
    take: Callable = rules.take
    withdraw: Callable = rules.withdraw
    release: Callable = rules.release
    pick_up: Callable = rules.pick_up
    answer: Callable = rules.answer
    sweep: Callable = rules.sweep
    identities_are_new: bool = True


@dataclass(frozen=True)
class Setting:
    """What is explored.

    Attributes:
        servers: number of servers.
        slots: of each server.
        mortals: roles of those who may die, at any step.
        deaths: how often in all.
        restarts: whether the dead start anew.
        timeouts: how often in all a client loses patience with a server that lives.
        tries: servers that a client asks at most, in turn.
        clients: number of clients.
        vandals: number of clients that write any state and request at any step, but count no number back.
    """

    servers: int = 1
    slots: int = 1
    mortals: tuple[str, ...] = ("client", "server", "sweeper")
    deaths: int = 0
    restarts: bool = True
    timeouts: int = 0
    tries: int = 2
    clients: int = 2
    vandals: int = 0
    rules: Rules = Rules()


class Segment(NamedTuple):
    server: int  # identity
    linked: bool
    slots: tuple[tuple[Any, ...], ...]


class Actor(NamedTuple):
    role: str
    number: int
    life: int
    stage: tuple[Any, ...] | None  # None: dead
    log: tuple[Any, ...] = ()
    half: Any = None  # of a payload, between its two steps


class World(NamedTuple):
    segments: tuple[Segment, ...]
    actors: tuple[Actor, ...]
    deaths: int  # left
    timeouts: int  # left
    calm: bool  # nobody died and no time-out struck, so far


class BrokenError(AssertionError):
    """Something does not hold; `steps` tell how it came about."""

    def __init__(self, what: str, steps: Sequence[str] = ()) -> None:
        super().__init__(what + "\n  " + "\n  ".join(steps))
        self.steps = steps


ROLES = {"client": 1, "server": 2, "sweeper": 3, "vandal": 4}


def identity(role: str, number: int, life: int) -> int:
    return ROLES[role] * 100 + number * 10 + life


class Explorer:
    """Walks through all worlds of a setting, nearest first."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.rules = setting, setting.rules
        self._advance = cache(self._advance_anew)

    # What each actor does, in stages: each gives the next one, and holds all that the actor knows.

    def client(self, shared: Shared, me: int, stage: tuple[Any, ...]) -> tuple[Any, ...]:
        name, attempt, *rest = stage
        if name == "attach":
            if attempt == self.setting.tries:
                return ("failed",)
            segment = shared.do("attach", (me // 10 + attempt) % self.setting.servers)
            return ("attach", attempt + 1) if segment is None else ("claim", attempt, segment, 0)
        segment, place, *rest = rest
        slot = PausingSlot(shared, segment, place)
        if name == "claim":
            if self.rules.claim(slot, me):
                return ("post", attempt, segment, place)
            if place + 1 < self.setting.slots:
                return ("claim", attempt, segment, place + 1)
            return ("claim", attempt, segment, 0) if shared.do("serves", segment) else ("attach", attempt + 1)
        if name == "post":
            return ("wait", attempt, segment, place, self.rules.post(slot, tag(me, attempt)))
        if name == "wait":
            if (reply := self.rules.take(slot, *rest)) is not None:
                return ("release", attempt, segment, place, reply)
            if not shared.do("serves", segment):
                return ("attach", attempt + 1)
            return ("withdraw", *stage[1:]) if shared.do("patience") else stage
        if name == "withdraw":
            self.rules.withdraw(slot, *rest)
            return ("release", attempt, segment, place, None)
        self.rules.release(slot, me)
        return ("attach", attempt + 1) if rest == [None] else ("done",)

    def vandal(self, shared: Shared, me: int, stage: tuple[Any, ...]) -> tuple[Any, ...]:
        """Claims the first slot, writes to it what it likes, and dies."""
        if stage == ("seize",):
            return ("scribble",) if self.rules.claim(PausingSlot(shared, 0, 0), me) else stage
        return stage if shared.do("scribble") else ("done",)

    def server(self, shared: Shared, me: int, stage: tuple[Any, ...]) -> tuple[Any, ...]:
        """Picks up what is ready in all slots, then answers it."""
        name, segment, place, picked = stage
        if name == "scan":
            if (found := self.rules.pick_up(PausingSlot(shared, segment, place))) is not None:
                picked = (*picked, (place, found[0], "malformed" if isinstance(found[1], WireError) else found[1]))
            if place + 1 < self.setting.slots:
                return ("scan", segment, place + 1, picked)
            return ("answer" if picked else "scan", segment, 0, picked)
        (place, sequence, request), *rest = picked
        self.rules.answer(PausingSlot(shared, segment, place), sequence, request)
        return ("answer" if rest else "scan", segment, 0, tuple(rest))

    def sweeper(self, shared: Shared, me: int, stage: tuple[Any, ...]) -> tuple[Any, ...]:
        name, segment, place = stage
        if name == "segment":
            serves = shared.do("serves", segment)
            if serves is None:
                return ("segment", 0, 0)
            if not serves:
                shared.do("unlink", segment)
                return ("segment", segment + 1, 0)
        self.rules.sweep(PausingSlot(shared, segment, place), me, shared.alive)
        return ("slot", segment, place + 1) if place + 1 < self.setting.slots else ("segment", segment + 1, 0)

    def _advance_anew(self, role: str, me: int, stage: tuple[Any, ...], log: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run an actor up to its next shared step.

        Returns:
            Stage, log and the step, which is None when it is done; and the stages that it came through.
        """
        through = []
        while stage[0] not in ("done", "failed"):
            try:
                stage, log = getattr(self, role)(Shared(log), me, stage), ()
                through.append(stage)
            except Pause as pause:
                return stage, log, pause.step, tuple(through)
        return stage, (), None, tuple(through)

    # The world and its steps.

    def first(self) -> World:
        setting = self.setting
        actors = [Actor("client", number, 0, ("attach", 0)) for number in range(setting.clients)]
        actors += [Actor("vandal", number, 0, ("seize",)) for number in range(setting.vandals)]
        actors += [Actor("server", number, 0, ("scan", number, 0, ())) for number in range(setting.servers)]
        actors.append(Actor("sweeper", 0, 0, ("segment", 0, 0)))
        segments = tuple(self._segment(identity("server", number, 0)) for number in range(setting.servers))
        return World(segments, tuple(actors), setting.deaths, setting.timeouts, calm=True)

    def _segment(self, server: int) -> Segment:
        return Segment(server, True, ((0, NOBODY, 0, EMPTY, EMPTY),) * self.setting.slots)

    def successors(self, world: World) -> Iterator[tuple[str, World, bool]]:
        """What happens, the world after it, and whether the actors bring it about by themselves."""
        for index, actor in enumerate(world.actors):
            if actor.stage is None:
                sweeps = actor.role == "sweeper"  # there will always be one
                if self.setting.restarts or sweeps:
                    yield f"{name(actor)} starts anew", self._restarted(world, index), sweeps
                continue
            me = self.identity(actor)
            stage, log, step, _ = self._advance(actor.role, me, actor.stage, actor.log)
            if step is None:
                continue
            for what, after, own in self._steps(world, index, actor._replace(stage=stage, log=log), step):
                yield f"{name(actor)}: {what}", after, own
            if world.deaths and actor.role in self.setting.mortals:
                yield f"{name(actor)} dies", self._dead(world, index), False

    def _steps(
        self, world: World, index: int, actor: Actor, step: tuple[Any, ...]
    ) -> Iterator[tuple[str, World, bool]]:
        kind, *arguments = step
        if kind == "patience":
            yield "has patience", self._went_on(world, index, actor, False), True
            if world.timeouts:
                impatient = world._replace(timeouts=world.timeouts - 1, calm=False)
                yield "loses patience", self._went_on(impatient, index, actor, True), False
        elif kind == "scribble":
            yield "dies", self._went_on(world, index, actor, False), True
            for place, value in self._scribbles(world.segments[0].slots[0]):
                written = self._written(world, 0, 0, place, value)
                yield f"writes {value} to {place}", self._went_on(written, index, actor, True), False
        elif kind in ("read", "write"):
            yield self._half(world, index, actor, *step)
        else:
            world, result = getattr(self, "_" + kind)(world, *arguments)
            yield f"{' '.join(map(str, step))} -> {result}", self._went_on(world, index, actor, result), True

    def _scribbles(self, slot: tuple[Any, ...]) -> Iterator[tuple[int, Any]]:
        """What a vandal may write, and where: the state word, or the request."""
        number = max(1, rules.sequence_of(slot[0]))
        yield from ((PLACE[Word.STATE], rules.state_word(state, number)) for state in (*State, 255))
        yield from ((REQUEST, (half, half)) for half in (TORN, (1, "any")))

    def _half(self, world, index, actor, kind, segment, slot, area, values=None) -> tuple[str, World, bool]:
        """One half of a payload, which is read or written in two steps."""
        second = actor.half is not None
        words = world.segments[segment].slots[slot]
        if kind == "read":
            value = words[area][second]
            result = (actor.half[0], value) if second else None
        else:
            value, result = values[second], None
            halves = (words[area][0], value) if second else (value, words[area][1])
            world = self._written(world, segment, slot, area, halves)
        what = f"{kind}s half {int(second) + 1} of {'request' if area == REQUEST else 'reply'} {slot}: {value}"
        if second:
            return what, self._went_on(world, index, actor._replace(half=None), result), True
        return what, self._with(world, index, actor._replace(half=(value,))), True

    def _load(self, world, segment, slot, place):
        return world, world.segments[segment].slots[slot][place]

    def _swap(self, world, segment, slot, place, expected, new):
        if world.segments[segment].slots[slot][place] != expected:
            return world, False
        return self._written(world, segment, slot, place, new), True

    def _store(self, world, segment, slot, place, new):
        return self._written(world, segment, slot, place, new), None

    def _alive(self, world, who):
        """Whether somebody lives; who is done has exited."""
        living = (actor for actor in world.actors if actor.stage not in (None, ("done",), ("failed",)))
        return world, any(self.identity(actor) == who for actor in living)

    def _serves(self, world, segment):
        """Whether the segment's server lives; None if there is no such segment."""
        if segment >= len(world.segments):
            return world, None
        return self._alive(world, world.segments[segment].server)

    def _attach(self, world, server):
        for index in reversed(range(len(world.segments))):
            segment = world.segments[index]
            if segment.server // 10 == identity("server", server, 0) // 10 and self._serves(world, index)[1]:
                return world, index
        return world, None

    def _unlink(self, world, segment):
        segments = list(world.segments)
        segments[segment] = segments[segment]._replace(linked=False)
        return world._replace(segments=tuple(segments)), None

    def _written(self, world, segment, slot, place, value) -> World:
        segments = list(world.segments)
        slots = list(segments[segment].slots)
        slots[slot] = (*slots[slot][:place], value, *slots[slot][place + 1 :])
        segments[segment] = segments[segment]._replace(slots=tuple(slots))
        return world._replace(segments=tuple(segments))

    def _went_on(self, world: World, index: int, actor: Actor, result: Any) -> World:
        me = self.identity(actor)
        stage, log, _, through = self._advance(actor.role, me, actor.stage, (*actor.log, result))
        for _, attempt, _, _, reply in (one for one in through if one[0] == "release"):
            if reply is not None and reply != ((tag(me, attempt),) * 2,) * 2:
                raise BrokenError(f"{name(actor)} took {reply} as the reply to {tag(me, attempt)}")
        if stage == ("failed",) and world.calm:
            raise BrokenError(f"{name(actor)} failed though nobody died and no time-out struck")
        return self._with(world, index, actor._replace(stage=stage, log=log))

    def _with(self, world: World, index: int, actor: Actor) -> World:
        actors = (*world.actors[:index], actor, *world.actors[index + 1 :])
        return world._replace(actors=actors)

    def _dead(self, world: World, index: int) -> World:
        dead = world.actors[index]._replace(stage=None, log=(), half=None)
        return self._with(world, index, dead)._replace(deaths=world.deaths - 1, calm=False)

    def _restarted(self, world: World, index: int) -> World:
        old = world.actors[index]
        stage = {"client": ("attach", 0), "sweeper": ("segment", 0, 0), "server": ("scan", len(world.segments), 0, ())}
        actor = old._replace(life=old.life + 1, stage=stage[old.role])
        if actor.role == "server":
            world = world._replace(segments=(*world.segments, self._segment(self.identity(actor))))
        return self._with(world, index, actor)

    def identity(self, actor: Actor) -> int:
        return identity(actor.role, actor.number, actor.life if self.rules.identities_are_new else 0)

    def _forgetting(self, world: World) -> World:
        """Without what lies in segments that nobody will look at any more, so that fewer worlds differ."""
        if world.calm:
            return world
        used = {actor.stage[2] for actor in world.actors if actor.role == "client" and len(actor.stage or ()) > 2}
        used |= {actor.stage[1] for actor in world.actors if actor.role == "sweeper" and actor.stage}
        segments = tuple(
            segment if index in used or self._serves(world, index)[1] else segment._replace(slots=())
            for index, segment in enumerate(world.segments)
        )
        return world._replace(segments=segments)

    # What must hold.

    def check(self, world: World) -> None:
        """Of every world: no slot is used by two clients."""
        users = [
            actor.stage[2:4]
            for actor in world.actors
            if actor.role == "client" and actor.stage and actor.stage[0] in ("post", "wait", "withdraw", "release")
        ]
        if len(set(users)) < len(users):
            raise BrokenError("two clients use one slot")

    def at_rest(self, world: World) -> bool:
        """Whether all has come to its end."""
        if any(actor.role == "client" and actor.stage not in (None, ("done",), ("failed",)) for actor in world.actors):
            return False
        for index, segment in enumerate(world.segments):
            if self._serves(world, index)[1]:
                if any(rules.state_of(slot[0]) is not State.FREE or slot[1] != NOBODY for slot in segment.slots):
                    return False
            elif segment.linked:
                return False
        return True

    def explore(self, limit: int = 1_000_000) -> int:
        """Visit all worlds and check them.

        Returns:
            How many there are.

        Raises:
            BrokenError: something does not hold; with the shortest way there.
        """
        worlds, index = [self.first()], {self.first(): 0}
        came_from: list[tuple[int, str]] = [(0, "")]
        before: list[list[int]] = [[]]  # worlds from which the actors get here by themselves
        here = 0
        while here < len(worlds):
            try:
                self.check(worlds[here])
                for what, after, own in self.successors(worlds[here]):
                    after = self._forgetting(after)
                    there = index.setdefault(after, len(worlds))
                    if there == len(worlds):
                        worlds.append(after)
                        came_from.append((here, what))
                        before.append([])
                    if own:
                        before[there].append(here)
            except Exception as error:
                raise BrokenError(f"{type(error).__name__}: {error}", path(came_from, here)) from error
            here += 1
            assert len(worlds) < limit, "too many worlds"
        self._check_progress(worlds, before, came_from)
        return len(worlds)

    def _check_progress(self, worlds: list[World], before: list[list[int]], came_from: list[tuple[int, str]]) -> None:
        reached = [here for here, world in enumerate(worlds) if self.at_rest(world)]
        good = set(reached)
        while reached:
            for there in before[reached.pop()]:
                if there not in good:
                    good.add(there)
                    reached.append(there)
        for here in range(len(worlds)):
            if here not in good:
                raise BrokenError("no way from here to an end of all requests and sweeping", path(came_from, here))


def tag(me: int, attempt: int) -> int:
    """What a client asks; different for each attempt, so that a reply to an older one is found out."""
    return me * 10 + attempt


def name(actor: Actor) -> str:
    return f"{actor.role} {actor.number}.{actor.life}"


def path(came_from: list[tuple[int, str]], here: int) -> list[str]:
    steps = []
    while here:
        here, what = came_from[here]
        steps.append(what)
    return steps[::-1]
