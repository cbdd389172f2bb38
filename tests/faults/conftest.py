"""One cluster of real processes for all fault tests: starting one takes longer than breaking it."""

import sys
from pathlib import Path

import pytest
from fault_cells import Matrix
from fault_cluster import FaultCluster

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))


def pytest_collection_modifyitems(items):
    """What needs the cluster takes minutes in all."""
    for item in items:
        if Path(__file__).parent in item.path.parents and "cluster" in item.fixturenames:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    with FaultCluster(tmp_path_factory.mktemp("faults")) as running:
        yield running


@pytest.fixture(scope="session")
def matrix(cluster):
    return Matrix(cluster)
