"""Runs the fault matrix once and prints it as the table of docs/faults.md.

    python scripts/fault_matrix.py [--json FILE]

What the cells are and what must come of them is in tests/faults, which this reports on: how requests ended, the longest
pause that a client saw, when a fault cost no client anything any more, and when a mended worker was used again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests", "tests/faults"))
from fault_cells import CELLS, FAULTS, IMPOSSIBLE, Cell, Found, Matrix
from fault_cluster import ROLES, FaultCluster
from fault_proxy import Moment


def outcome(found: Found) -> str:
    """One cell of the table."""
    lost = [end for end in (*found.ends, *found.later) if end != "served"]
    end = "served" if not lost else f"{len(lost)} x {', '.join(sorted(set(lost)))}"
    return f"{end}; {found.stall_s:.1f} / {found.settle_s:.1f} / {found.back_s:.1f}"


def table(results: Sequence[Found]) -> str:
    """All cells as Markdown, a row for each fault of each role."""
    by_cell = {found.cell: found for found in results}
    rows = [
        "| worker | fault | " + " | ".join(moment.value for moment in Moment) + " |",
        "|---|---|" + "---|" * len(Moment),
    ]
    for role in ROLES:
        for fault in FAULTS:
            cells = [by_cell.get(Cell(role, fault, moment)) for moment in Moment]
            rows.append(f"| {role} | {fault} | " + " | ".join(outcome(one) if one else "-" for one in cells) + " |")
    return "\n".join(rows)


def document(results: Sequence[Found]) -> str:
    """All cells as JSON."""
    rows = [{**dataclasses.asdict(found), "cell": str(found.cell)} for found in results]
    impossible = [{"fault": fault, "moment": moment.value, "why": why} for (fault, moment), why in IMPOSSIBLE.items()]
    return json.dumps({"cells": rows, "impossible": impossible}, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, FaultCluster(Path(folder)) as cluster:
        matrix, results = Matrix(cluster), []
        for number, cell in enumerate(CELLS, 1):
            print(f"{number} of {len(CELLS)}: {cell}", file=sys.stderr)
            results.append(matrix.run(cell))
    print(table(results))
    if options.json:
        options.json.write_text(document(results))


if __name__ == "__main__":
    main()
