"""Experts in servers, as `modeling.Model` takes them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError
from coterie.experts.client.connections import Connector
from coterie.experts.client.exchange import Patience
from coterie.experts.client.monitored import MonitoredDirectory
from coterie.experts.client.remote import RemoteExperts, Started
from coterie.modeling.expert_tensors import ExpertFiles, read_expert_model
from coterie.modeling.gates import Choice
from coterie.modeling.tiles import Floats

READY_S = 60.0
"""How long to wait at first until every expert has a server."""
TIMEOUT_S = 30.0
"""The longest that a layer may take."""
_CONNECT_S = 5.0
_log = logging.getLogger("coterie.experts")


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Where a model's experts are.

    Attributes:
        monitor: URL of the monitor that knows their servers.
        name: of this client, for people.
        timeout_s: the longest that a layer may take.
        patience: how long to wait for one server before others are asked.

    Raises:
        ConfigError: `timeout_s` is not positive.
    """

    monitor: str
    name: str
    timeout_s: float = TIMEOUT_S
    patience: Patience = Patience()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"experts: a layer may take {self.timeout_s} s; it must be positive")


class ModelExperts:
    """See `modeling.RemoteExperts`.

    Args:
        remote: the experts.
        timeout_s: the longest that a layer may take.
    """

    def __init__(self, remote: RemoteExperts, timeout_s: float) -> None:
        self._remote, self._timeout_s = remote, timeout_s

    def start(self, layer: int, rows: Floats, choice: Choice) -> StartedLayer:
        """As `modeling.RemoteExperts.start`."""
        deadline_s = time.monotonic() + self._timeout_s
        return StartedLayer(self._remote.start(layer, rows, choice.ids, choice.weights), deadline_s)


@dataclass(frozen=True, slots=True, eq=False)
class StartedLayer:
    """A layer that servers compute; see `modeling.layers.Begun`."""

    started: Started
    deadline_s: float

    def finish(self) -> Floats:
        """As `Begun.finish`."""
        return self.started.finish(self.deadline_s)

    def cancel(self) -> None:
        """As `Begun.cancel`."""
        self.started.cancel()


@contextlib.contextmanager
def experts_of(checkpoint: Path, config: ExpertsConfig) -> Iterator[ModelExperts]:
    """A checkpoint's experts, as `modeling.Model` takes them.

    Raises:
        CoterieError: as `remote_experts`.
    """
    with remote_experts(checkpoint, config) as remote:
        yield ModelExperts(remote, config.timeout_s)


@contextlib.contextmanager
def remote_experts(checkpoint: Path, config: ExpertsConfig) -> Iterator[RemoteExperts]:
    """Connections to the servers of a checkpoint's experts; they must have been started with the same checkpoint.

    Raises:
        ConfigError: the monitor's URL is none.
        EngineError: some expert has no server, even after a while.
        InputError: a file is missing or damaged, or a field is missing or wrong.
        UnsupportedError: an architecture or a setting whose experts are not computed here.
    """
    model, fingerprint = read_expert_model(checkpoint), ExpertFiles.open(checkpoint).fingerprint()
    with contextlib.closing(MonitoredDirectory(config.monitor, model.geometry, fingerprint, config.name)) as directory:
        _log.info("waiting %g s at most until %s knows a server of every expert", READY_S, config.monitor)
        directory.await_all(time.monotonic() + READY_S)
        connect = Connector(fingerprint)
        remote = RemoteExperts(model.geometry, model.hidden, directory, connect, patience=config.patience)
        with contextlib.closing(remote):
            remote.connect(time.monotonic() + _CONNECT_S)
            _log.info("the experts are at %d servers", len(directory.table().servers()))
            yield remote
