"""What the demo of expert servers makes of what clients saw, and how it shows it."""

import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from coterie.cli.experts_demo import _table, _view, demo
from coterie.errors import ConfigError
from coterie.experts.monitor.messages import Coverage, ServerRow, Status
from coterie.up.experts_demo import Phase, phases
from coterie.up.experts_demo.load import Seen

SEEN = Seen(
    arrivals=[(0.5, 1), (1.5, 3), (2.0, 4), (3.9, 2), (4.5, 1)],
    pauses=[(1.5, 0.2), (1.9, 0.1), (3.9, 0.6)],
    finished=[1.0, 3.0, 3.5, 4.2],
    errors=[(2.5, "lost")],
)


def test_each_phase_ends_where_the_next_begins():
    found = phases([(0.0, "two servers"), (2.0, "one is killed")], 4.0, SEEN)
    assert found == [
        Phase("two servers", 0.0, 2.0, tokens_per_s=2.0, longest_pause_s=0.2, finished=1, failed=0),
        Phase("one is killed", 2.0, 4.0, tokens_per_s=3.0, longest_pause_s=0.6, finished=2, failed=1),
    ]
    assert _table(found).rows[1] == ("one is killed", "2.0", "2.0", "3", "600", "2", "1")


def test_a_phase_without_tokens_has_no_pause():
    assert phases([(5.0, "nothing")], 6.0, SEEN) == [Phase("nothing", 5.0, 6.0, 0.0, 0.0, 0, 0)]


class Run:
    """Where a demo is."""

    diary = ((8.0, "KILLED b: SIGKILL to process group 7"),)
    row = ServerRow("1", "b", "dead", "its end", "", "", 1, 0.5, 0.5, 64, 12.0, 3, 2, 0, 1 << 20)
    status = Status("run", 7, True, 9.0, 2, [row], Coverage("tiny", "0" * 32, 1, 64, {1: 64}, 0, None, None))

    class load:  # noqa: N801
        seen = SEEN

    def now(self):
        return 4.0


def test_the_view_says_what_clients_get_who_serves_and_what_happened():
    console = Console(file=io.StringIO(), width=120)
    console.print(_view(Run()))
    lines = console.file.getvalue().splitlines()
    assert lines[0].strip() == "4.0 s      3 tokens/s   2 clients, 4 requests answered, 1 failed"
    assert next(line.split()[:2] for line in lines if line.startswith("b ")) == ["b", "dead"]
    assert lines[-1].strip() == "8.0 s  KILLED b: SIGKILL to process group 7"


def test_a_cluster_without_expert_servers_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "cluster.yaml").write_text("""
model: model
served_model_name: tiny
engine: embedded
prefill: {count: 1}
decode: {count: 1}
""")
    with pytest.raises(ConfigError, match="the demo needs `experts` and `gateway`"):
        CliRunner().invoke(demo, ["--cluster", str(tmp_path / "cluster.yaml")], catch_exceptions=False)
