"""What `coterie up` prints where nobody watches a terminal."""

from coterie.cli.up import _as_lines
from coterie.up.cluster import MemberStatus


def status(name, state):
    return MemberStatus(name=name, role="decode", url=f"http://127.0.0.1:1/{name}", pid=1, state=state, restarts=0)


def test_a_line_for_each_process_that_changed():
    before = [status("decode-0", "starting"), status("decode-1", "starting")]
    now = [status("decode-0", "ready"), status("decode-1", "starting")]
    assert _as_lines(now, before) == "decode-0: ready http://127.0.0.1:1/decode-0"
    assert _as_lines(before, []).count("\n") == 1
