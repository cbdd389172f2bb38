"""The server that the tests of `coterie collect` collect from."""

import threading

import pytest
from collecting import Collection, Engine


@pytest.fixture(scope="module")
def server():
    with Engine() as engine:
        thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield engine
        engine.shutdown()
        thread.join()


@pytest.fixture
def engine(server):
    server.bodies.clear()
    server.script.clear()
    return server


@pytest.fixture
def collection(engine, tmp_path):
    return Collection(engine, tmp_path)
