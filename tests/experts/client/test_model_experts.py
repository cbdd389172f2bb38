"""A model whose experts are in servers is the model: the same bits from one server, nearly the same from several."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from served import known_model, serving

from coterie.errors import ConfigError, EngineError, InputError
from coterie.experts.client import RemoteExperts
from coterie.experts.client.connections import Connector
from coterie.experts.client.model_experts import ExpertsConfig, ModelExperts
from coterie.modeling import Model, StepBatch, prepare
from coterie.modeling.checkpoint import Checkpoint
from tiny_checkpoints import ARCHITECTURES, write_checkpoint


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def logits_of(model, tokens=90):
    kv = np.zeros(model.kv_shape(8, 16), np.float32)
    ids = np.random.default_rng(3).integers(0, model.vocab, tokens)
    return model.forward(StepBatch(ids, np.arange(tokens), [(0, tokens)], [list(range(8))], np.arange(tokens)), kv)


@contextlib.contextmanager
def remote_model(checkpoint, directory, overlap=None):
    """The model without the weights of its experts."""
    known = known_model(checkpoint)
    with contextlib.closing(
        RemoteExperts(known.geometry, known.hidden, directory, Connector(known.fingerprint))
    ) as remote:
        weights = prepare(checkpoint, checkpoint / "packed", routed=False)
        yield Model.open(weights, experts=ModelExperts(remote, 60.0), overlap=overlap)


@pytest.mark.parametrize("overlap", [None, 2])
def test_one_server_gives_the_bits_of_the_local_experts(checkpoint, overlap):
    local = logits_of(Model.open(prepare(checkpoint, checkpoint / "packed")))
    with serving(checkpoint, "all") as directory, remote_model(checkpoint, directory, overlap) as model:
        remote = logits_of(model)
    np.testing.assert_array_equal(remote.logits, local.logits)
    np.testing.assert_array_equal(remote.expert_ids, local.expert_ids)


def test_several_servers_give_nearly_the_same(checkpoint):
    local = logits_of(Model.open(prepare(checkpoint, checkpoint / "packed"))).logits
    with serving(checkpoint, "0-4", "2-7", "0,1,6") as directory, remote_model(checkpoint, directory) as model:
        remote = logits_of(model).logits
    assert np.abs(remote - local).max() <= 1e-5 * np.abs(local).max()


def test_weights_without_experts_are_made_of_the_other_tensors_alone(checkpoint, monkeypatch):
    read = []
    original = Checkpoint.tensor
    monkeypatch.setattr(
        Checkpoint, "tensor", lambda self, name, *shape: (read.append(name), original(self, name, *shape))[1]
    )
    file = prepare(checkpoint, checkpoint / "fresh", routed=False)
    assert read
    assert not [name for name in read if ".experts." in name]
    assert file.stat().st_size < prepare(checkpoint, checkpoint / "fresh").stat().st_size
    with pytest.raises(InputError, match=r"no routed experts; .* name their servers"):
        Model.open(file)


def test_a_layer_that_nobody_computes_in_time_is_an_error(checkpoint):
    hole = "0-6"
    known = known_model(checkpoint)
    with (
        serving(checkpoint, hole) as directory,
        contextlib.closing(
            RemoteExperts(known.geometry, known.hidden, directory, Connector(known.fingerprint))
        ) as remote,
    ):
        weights = prepare(checkpoint, checkpoint / "packed", routed=False)
        for overlap in (None, 2):
            with pytest.raises(EngineError, match=r"no reply by the deadline for experts \[7\]; .* none"):
                logits_of(Model.open(weights, experts=ModelExperts(remote, 0.05), overlap=overlap))
    with pytest.raises(ConfigError, match="a layer may take 0 s"):
        ExpertsConfig("http://127.0.0.1:1", "test", timeout_s=0)
