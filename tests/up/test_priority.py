"""Threads that poll without pause give way; those that wait or do the work do not."""

from __future__ import annotations

import os
import subprocess
import sys

from coterie.up.priority import lower_polling_threads, polling_cpu_s
from coterie.up.processes import group_cpu_s

SCRIPT = """
import threading, time
def poll():
    while True:
        pass
def wait():
    time.sleep(60)
names = {}
for target in (poll, wait):
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    print(thread.native_id, flush=True)
wait()
"""


def test_only_a_helper_thread_that_spins_is_lowered():
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            poller, waiter = int(process.stdout.readline()), int(process.stdout.readline())
            assert polling_cpu_s(process.pid) == 0
            assert lower_polling_threads(process.pid) == 1
            priorities = [os.getpriority(os.PRIO_PROCESS, thread) for thread in (poller, waiter, process.pid)]
            assert priorities == [19, 0, 0]
            assert 0 < polling_cpu_s(process.pid) <= group_cpu_s(process.pid)
        finally:
            process.kill()
