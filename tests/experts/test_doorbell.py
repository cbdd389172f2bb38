"""No ring is lost, however one who waits and one who rings interleave: all interleavings are tried."""

import pytest

from coterie.experts.transport.doorbell import Doorbell

RINGS, SLEEPERS = 0, 4
ASLEEP = "asleep"


class Pause(BaseException):
    """The next shared step is not in the log yet."""


class Steps:
    """Takes the results of shared steps from a log; stands for a process's `Words`, and for what it looks at."""

    def __init__(self, log):
        self.log, self.next = iter(log), None

    def do(self, *step):
        if self.next is None:
            for result in self.log:
                return result
            self.next = step
        raise Pause  # once more, in `finally`

    def load32(self, offset):
        return self.do("load", offset)

    def add32(self, offset, amount):
        self.do("add", offset, amount)

    def wait32(self, offset, value, timeout_s):
        self.do("wait", offset, value)

    def wake32(self, offset):
        self.do("wake")

    def look(self):
        return self.do("look")

    def tell(self):
        self.do("tell")


def wait(steps):
    assert Doorbell(steps, 0).wait(steps.look, 1e9) == "news"


def ring(steps):
    steps.tell()
    Doorbell(steps, 0).ring()


def ring_before_the_news(steps):
    """Wrong."""
    Doorbell(steps, 0).ring()
    steps.tell()


def wait_after_a_look(steps):
    """Wrong: looks before it reads the count of rings."""
    steps.add32(SLEEPERS, 1)
    while steps.look() is None:
        steps.wait32(RINGS, steps.load32(RINGS), 1)


def next_step(process, log):
    steps = Steps(log)
    try:
        process(steps)
    except Pause:
        return steps.next
    return None


def act(step, words, told, asleep):
    """Result of a step, words, news told, and who sleeps, after it."""
    kind, *arguments = step
    rings, sleepers = words
    if kind == "load":
        return words[arguments[0] // 4], words, told, asleep
    if kind == "add":
        changed = (rings + arguments[1], sleepers) if arguments[0] == RINGS else (rings, sleepers + arguments[1])
        return None, changed, told, asleep
    if kind == "wait":
        return (ASLEEP if rings == arguments[1] else None), words, told, asleep
    if kind == "wake":
        return None, words, told, False
    return ("news" if told else None), words, told or kind == "tell", asleep


def sleeps_for_ever(waiting, ringing):
    """Whether one who waits can be left asleep after two rang."""
    start = ((0, 0), False, False, ((), (), ()))
    seen, todo = {start}, [start]
    processes = (waiting, ringing, ringing)
    while todo:
        words, told, asleep, logs = todo.pop()
        moved = False
        for who, process in enumerate(processes):
            step = next_step(process, logs[who])
            if step is None or (who == 0 and asleep):
                continue
            moved = True
            result, *after = act(step, words, told, asleep)
            if result == ASLEEP:
                result, after = None, [words, told, True]
            world = (*after, (*logs[:who], (*logs[who], result), *logs[who + 1 :]))
            if world not in seen:
                seen.add(world)
                todo.append(world)
        if not moved and asleep:
            return True
    return False


def test_who_waits_is_woken():
    assert not sleeps_for_ever(wait, ring)


@pytest.mark.parametrize(("waiting", "ringing"), [(wait_after_a_look, ring), (wait, ring_before_the_news)])
def test_a_wrong_order_is_found_out(waiting, ringing):
    assert sleeps_for_ever(waiting, ringing)
