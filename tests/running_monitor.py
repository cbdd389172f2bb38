"""A monitor on a real socket, in a thread of the test's process."""

import asyncio
import contextlib
import queue
import threading
import time

from coterie.experts.membership import Timing
from coterie.experts.monitor.process import MonitorConfig, serve

QUICK = Timing(heartbeat_s=0.05, suspect_after_s=0.4, dead_after_s=0.8)
LONG_S = 20.0


@contextlib.contextmanager
def running_monitor(port=0, timing=QUICK):
    """Yields its URL."""
    ready = queue.SimpleQueue()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    def run():
        try:
            loop.run_until_complete(serve(MonitorConfig(port=port, timing=timing), ready.put, ended))
        except BaseException as error:
            ready.put(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        url = ready.get(timeout=LONG_S)
        assert isinstance(url, str), url
        yield url
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


def until(look):
    """What `look` finds, as soon as it finds something."""
    end_s = time.monotonic() + LONG_S
    while not (found := look()):
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.005)
    return found
