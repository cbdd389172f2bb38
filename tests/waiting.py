"""Waiting for what other threads and processes do."""

import time


def wait_until(condition, what="it", within_s=20.0):
    """Wait for a condition, looking less often the longer it takes, since to look costs others time; seconds taken."""
    start_s = time.monotonic()
    while not condition():
        passed_s = time.monotonic() - start_s
        assert passed_s < within_s, f"waited {within_s:g} s for {what}"
        time.sleep(min(max(0.02, passed_s / 20), 0.5))
    return time.monotonic() - start_s
