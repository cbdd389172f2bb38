"""`coterie engine` on a command line that cannot work."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from coterie.cli.engine import engine

TINY = Path(__file__).parents[2] / "models" / "coterie-tiny"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["/nowhere"], "does not exist"),
        ([TINY, "--kv-blocks", 5, "--kv-memory", 5], "exclude one another"),
        ([TINY, "--role", "router"], "is not one of"),
        ([TINY, "--kv-lease", 0], "not in the range"),
        ([TINY, "--port", 70000], "not in the range"),
        ([TINY, "--kv-host", "0.0.0.0"], "name one they can reach"),
        ([TINY, "--kv-timeout", "nan"], "--kv-timeout nan: it must be positive and at most 86400"),
        ([TINY, "--kv-timeout", "inf"], "--kv-timeout inf: it must be positive and at most 86400"),
        ([TINY.parent], "config.json"),
        ([TINY, "--log-steps", __file__], "does not begin with requests,active_experts,step_ms"),
        ([TINY, "--pad-intermediate", 63], "pad_intermediate is 63"),
        ([TINY, "--experts-timeout", 5], "--experts-timeout is of use with --experts-from only"),
        ([TINY, "--experts-overlap", 16], "--experts-overlap is of use with --experts-from only"),
        ([TINY, "--experts-overlap", 1], "not in the range"),
    ],
)
def test_what_is_wrong_is_named(arguments, problem):
    result = CliRunner().invoke(engine, [str(argument) for argument in arguments])
    assert result.exit_code != 0
    assert problem in result.output + str(result.exception)
