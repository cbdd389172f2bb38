"""The keeper: the parent of one supervised command, so that nothing of it outlives its supervisor.

    python keeper.py GRACE_S COMMAND [ARGUMENT ...]

A server such as vLLM is a tree of processes.  Killing its root orphans the rest, and a supervisor that is
itself killed stops nothing.  The keeper closes both gaps:

- It is a *subreaper*: whatever the command starts, in whatever session, stays below the keeper.
- Its standard input is a pipe that only the supervisor writes to.  End of file means that the supervisor
  is gone, however it went, and means stop; so does a byte `s`.  A byte `k` asks for a kill without grace.
- Signals sent to the keeper go to the command.
- If the keeper itself is killed, the kernel kills the command (`PR_SET_PDEATHSIG`); the supervisor then
  kills the process group, whose leader the keeper was.

Stop means: SIGTERM to the command, `GRACE_S` seconds for it to end, two more at most for helpers that end by
themselves (Python's resource tracker removes shared memory then), SIGKILL to all that is left.

The file runs by its path with the standard library alone, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINGER_S = 2.0
_POLL_S = 0.05


def main(arguments: list[str]) -> int:
    """Run the command until it ends or the supervisor wants it to; returns its exit status, shell style."""
    grace_s, command = float(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(  # noqa: S603 - the command is the supervisor's own
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509 - no threads here
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: child.send_signal(received))
    if not _wait(child, watch_wishes=True, timeout_s=None):
        _stop(child, grace_s)
    _end_descendants(min(grace_s, _LINGER_S) if child.returncode is not None else 0.0)
    child.wait()
    _reap()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _stop(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Carry out the supervisor's wish; a kill wish may follow a stop wish, but nothing follows end of file."""
    wish = os.read(0, 1)
    if wish != b"k":
        child.terminate()
        _wait(child, watch_wishes=wish != b"", timeout_s=grace_s)


def _wait(child: subprocess.Popen[bytes], *, watch_wishes: bool, timeout_s: float | None) -> bool:
    """Wait for the child's end (true) or for a wish or the timeout (false)."""
    pidfd = os.pidfd_open(child.pid)
    ready, _, _ = select.select([pidfd, 0] if watch_wishes else [pidfd], [], [], timeout_s)
    os.close(pidfd)
    return pidfd in ready and child.wait() is not None


def _end_descendants(linger_s: float) -> None:
    """Give descendants `linger_s` to end by themselves, then kill until none is left."""
    deadline_s = time.monotonic() + linger_s
    while alive := _descendants():
        if time.monotonic() >= deadline_s:
            for pid in alive:
                _kill(pid)
        time.sleep(_POLL_S)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):  # no child is left
        while os.waitpid(-1, 0):
            pass


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended since it was listed
        os.kill(pid, signal.SIGKILL)


def _descendants() -> list[int]:
    """Living processes below this one."""
    children: dict[int, list[int]] = {}
    for pid, parent, state in _processes():
        if state not in "ZX":
            children.setdefault(parent, []).append(pid)
    found, ahead = [], [os.getpid()]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def _processes() -> list[tuple[int, int, str]]:
    """`(pid, parent, state)` of every process that can be seen."""
    rows = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended since it was listed
            rows.append((int(name), int(parent), state))
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
