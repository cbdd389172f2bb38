"""Each fault of a worker at each moment of a request: what the client gets, and that nothing is left behind."""

import pytest
from fault_cells import CELLS, PROCESS_FAULTS, Cell
from fault_proxy import Moment

FAST = (Cell("decode", "killed", Moment.WAITING), Cell("prefill", "killed", Moment.MIDST))


def cells():
    kept = [cell for cell in CELLS if cell.fault in PROCESS_FAULTS]
    return [pytest.param(cell, id=str(cell), marks=() if cell in FAST else pytest.mark.slow) for cell in kept]


@pytest.mark.parametrize("cell", cells())
def test_a_worker_fails(matrix, cell):
    found = matrix.run(cell)  # which ends with all workers back, no load counted and no KV held
    assert not {"wrong"} & {*found.ends, *found.later}
    assert not matrix.cluster.stranded_files()
