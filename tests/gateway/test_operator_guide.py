"""The tables of the operator guide are complete, and name nothing that is not there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from stories import cluster, story

import coterie.gateway
from coterie.gateway.processes import together
from coterie.routing import refit

GUIDE = Path(__file__).parents[2] / "docs" / "operate.md"
GATEWAY = Path(coterie.gateway.__file__).parent
ELSEWHERE = Path(together.__file__).read_text() + Path(refit.__file__).read_text()
"""Where metrics are made that a gateway of one process, which does not refit, has none of."""

SAYS = ("RefusedError", "send_error", "error_body")
"""Who tells a client of an error."""


def rows(title: str) -> Iterator[list[str]]:
    """Cells of the first table of a section."""
    section = GUIDE.read_text().split(f"## {title}\n")[1]
    lines = section[section.index("\n|") :].lstrip().split("\n\n")[0].splitlines()
    for line in lines[2:]:
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


@story
async def test_the_table_of_metrics_is_that_of_the_registry() -> None:
    told = {name for row in rows("Metrics") for name in re.findall(r"`(coterie_\w+)`", row[0])}
    async with cluster(peer=("http://127.0.0.1:1",)) as running:
        there = {
            family.name + ("_total" if family.type == "counter" else "")
            for family in running.gateway.metrics.registry.collect()
        }
    assert there <= told, f"not in the guide: {there - told}"
    of_others = {name.removeprefix("coterie_") for name in told - there}
    missing = {name for name in of_others if name.removesuffix("_total") not in ELSEWHERE and "refits_" not in name}
    assert not missing, f"in the guide only: {missing}"


def test_every_error_that_the_source_names_is_in_the_guide_with_its_status() -> None:
    told = set()
    for status, kind, *_ in rows("Errors"):
        words = re.findall(r"`(\w+)`", kind)
        told.add((status, words[-1] if "," in kind else None))
        assert words or status == "any"
    said = set(errors_of_the_source())
    assert len(said) > 15, "they are not found any more"
    assert said <= told, f"not in the guide: {said - told}"
    known = {"200", "any"}
    assert {(status, code) for status, code in told - said if status not in known} == set(), "in the guide only"


def test_every_code_that_the_source_names_is_in_the_guide() -> None:
    """Those of events in a stream that has begun, too, which have no status of their own."""
    told = {word for _, kind, *_ in rows("Errors") for word in re.findall(r"`(\w+)`", kind)}
    named = {code for file in GATEWAY.rglob("*.py") for code in re.findall(r'code="(\w+)"', file.read_text())}
    assert "worker_lost" in named
    assert named <= told, f"not in the guide: {named - told}"


def errors_of_the_source() -> Iterator[tuple[str, str | None]]:
    """Status and code of each error that the gateway says, by its source."""
    for file in GATEWAY.rglob("*.py"):
        tree = ast.parse(file.read_text())
        for makes in ast.walk(tree):
            if isinstance(makes, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _errors_of(makes, tree)


def _errors_of(
    function: ast.FunctionDef | ast.AsyncFunctionDef, module: ast.Module
) -> Iterator[tuple[str, str | None]]:
    for call in _calls(function):
        if _name(call) not in SAYS or not (call.args and isinstance(call.args[0], ast.Constant)):
            continue
        if not isinstance(call.args[0].value, int):  # the body alone; its status is given elsewhere
            continue
        status = str(call.args[0].value)
        code = next((word.value for word in call.keywords if word.arg == "code"), None)
        if isinstance(code, ast.Name):  # a parameter: what the callers give
            yield from ((status, given) for given in _given(function.name, module))
        else:
            yield status, code.value if isinstance(code, ast.Constant) else None


def _given(name: str, module: ast.Module) -> Iterator[str]:
    """What looks like a code among the arguments of a function's calls, and of the calls of whoever passes one on."""
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in _calls(function):
            if _name(call) != name:
                continue
            texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            codes = [text for text in texts if re.fullmatch(r"[a-z_]+", text)]
            yield from codes or _given(function.name, module)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
