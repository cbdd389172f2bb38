"""Laws of the supervised process, shown with small real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.clock import ManualClock
from coterie.errors import EngineError
from coterie.up.processes import ProcessSpec, State, SupervisedProcess, group_cpu_s
from waiting import wait_until

# A server in miniature: a child that leaves the process group, pids on record, then sleep.
TREE = """
import os, subprocess, sys, time, signal
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
away = subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(sys.argv[1], "a") as file:
    print(os.getpid(), away.pid, file=file, flush=True)
print("started", flush=True)
time.sleep(600)
"""


def alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Tree:
    """A supervised TREE whose readiness is that it wrote its pids."""

    def __init__(self, folder, *arguments, **limits):
        self.file = folder / "pids"
        self.clock = ManualClock()
        command = (sys.executable, "-IS", "-c", TREE, str(self.file), *arguments)
        spec = ProcessSpec("tree", command, folder / "log", "unused", grace_s=limits.pop("grace_s", 0.3), **limits)
        self.process = SupervisedProcess(spec, clock=self.clock, probe=lambda _: self.starts() > self.seen)
        self.seen = 0

    def pids(self):
        return [int(pid) for pid in self.file.read_text().split()]

    def starts(self):
        return len(self.file.read_text().splitlines()) if self.file.exists() else 0

    def poll_until(self, state):
        def reached():
            self.process.poll()
            return self.process.state is state

        wait_until(reached, state.value)
        self.seen = self.starts()

    def start(self):
        self.process.start()
        self.poll_until(State.READY)


@pytest.fixture
def tree(tmp_path):
    trees = []

    def make(*arguments, **limits):
        trees.append(Tree(tmp_path, *arguments, **limits))
        return trees[-1]

    yield make
    for made in trees:
        made.process.kill()


def test_stop_ends_the_whole_tree_even_what_left_the_group(tree):
    server = tree()
    server.start()
    server.process.stop()
    assert server.process.state is State.STOPPED
    assert server.process.pid is None
    assert not any(map(alive, server.pids()))


def test_a_command_has_a_group_of_its_own_in_the_session_of_its_supervisor(tree):
    server = tree()
    server.start()
    command, away = server.pids()
    assert os.getpgid(command) == server.process.pid
    assert os.getsid(command) == os.getsid(0)  # priorities would count for nothing beyond one
    assert os.getsid(away) == away


def test_a_command_deaf_to_sigterm_is_killed_after_its_grace(tree):
    server = tree("deaf", grace_s=0.2)
    server.start()
    server.process.stop()
    assert not any(map(alive, server.pids()))


def test_kill_overtakes_a_stop_that_waits(tree):
    server = tree("deaf", grace_s=600.0)
    server.start()
    server.process.request_stop()
    server.process.kill()
    assert not any(map(alive, server.pids()))


def test_a_killed_command_is_started_again_and_leaves_no_orphans(tree):
    server = tree()
    server.start()
    first = server.pids()
    os.kill(first[0], signal.SIGKILL)
    server.poll_until(State.BACKOFF)
    assert not any(map(alive, first))
    server.clock.advance(0.9)
    server.process.poll()
    assert server.process.state is State.BACKOFF  # the first delay is 1 s
    server.clock.advance(0.2)
    server.poll_until(State.READY)
    assert server.process.restarts == 1
    assert alive(server.pids()[-2])


def test_delays_double_and_a_steady_minute_forgives(tree):
    server = tree(max_restarts=2)
    server.start()
    for delay_s in (1.0, 2.0):
        os.kill(server.pids()[-2], signal.SIGKILL)
        server.poll_until(State.BACKOFF)
        server.clock.advance(delay_s - 0.1)
        server.process.poll()
        assert server.process.state is State.BACKOFF
        server.clock.advance(0.1)
        server.poll_until(State.READY)
    server.clock.advance(60.0)
    os.kill(server.pids()[-2], signal.SIGKILL)
    server.poll_until(State.BACKOFF)  # a third loss, yet the first after a steady minute


def test_too_many_losses_in_a_row_fail_the_process(tree):
    server = tree(max_restarts=0)
    server.start()
    os.kill(server.pids()[0], signal.SIGKILL)
    server.poll_until(State.FAILED)
    assert server.process.problem == "ended too often: 1 times in a row (killed by SIGKILL)"


def test_a_command_that_ends_before_it_was_ready_is_not_tried_again(tmp_path):
    command = (sys.executable, "-c", "print('no such flag'); raise SystemExit(2)")
    process = SupervisedProcess(ProcessSpec("bad", command, tmp_path / "log", "unused"), probe=lambda _: False)
    process.start()
    wait_until(lambda: process.poll() or process.state is State.FAILED, "failure")
    assert process.problem == "ended before it was ready (exit status 2)"
    assert process.log_tail() == "no such flag"


def test_a_start_that_takes_too_long_fails_and_leaves_nothing(tree):
    server = tree(ready_timeout_s=30.0)
    server.seen = 99  # never ready
    server.process.start()
    wait_until(lambda: server.starts() == 1, "start")
    server.clock.advance(30.1)
    server.process.poll()
    assert server.process.state is State.FAILED
    assert server.process.problem == "not ready after 30 s"
    assert not any(map(alive, server.pids()))


def test_a_killed_keeper_takes_its_command_along(tree):
    server = tree()
    server.start()
    command_pid = server.pids()[0]
    os.kill(server.process.pid, signal.SIGKILL)
    server.poll_until(State.BACKOFF)
    wait_until(lambda: not alive(command_pid), "the command's end")
    os.kill(server.pids()[1], signal.SIGKILL)  # it left the group and its keeper is dead: nobody could know it


def test_nothing_survives_a_killed_supervisor(tmp_path):
    file = tmp_path / "pids"
    supervisor = f"""
import sys, time
from pathlib import Path
from coterie.up.processes import ProcessSpec, SupervisedProcess
command = (sys.executable, "-IS", "-c", {TREE!r}, {str(file)!r}, "deaf")
process = SupervisedProcess(ProcessSpec("tree", command, Path({str(tmp_path / "log")!r}), "unused", grace_s=0.2))
process.start()
print(process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, text=True) as parent:
        keeper = int(parent.stdout.readline())
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"), "start")
        parent.kill()
    pids = [keeper, *map(int, file.read_text().split())]
    wait_until(lambda: not any(map(alive, pids)), "the end of all")


def test_a_program_that_is_not_there_is_an_error_before_anything_runs(tmp_path):
    process = SupervisedProcess(ProcessSpec("x", ("/no/such/program",), tmp_path / "log", "unused"))
    with pytest.raises(EngineError, match="/no/such/program is not an executable file"):
        process.start()
    assert process.pid is None


def test_cpu_time_of_a_group_sums_its_processes(tmp_path):
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        assert 0.25 <= group_cpu_s(process.pid) <= 5.0
        process.kill()
    assert group_cpu_s(process.pid) == 0.0
