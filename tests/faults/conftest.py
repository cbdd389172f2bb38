"""One cluster of real processes for all fault tests: starting one takes longer than breaking it."""

import pytest
from fault_cells import Matrix
from fault_cluster import FaultCluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    with FaultCluster(tmp_path_factory.mktemp("faults")) as running:
        yield running


@pytest.fixture(scope="session")
def matrix(cluster):
    return Matrix(cluster)
