"""The YAML file of a local cluster.

model: ./coterie-tiny        # a folder (relative to this file) or, for vLLM, a name on a model hub
served_model_name: tiny
engine: vllm                 # or: embedded
engine_env: ../.venv-vllm    # for vLLM; default: $COTERIE_VLLM_ENV, else .venv-vllm in the current folder
prefill: {count: 1, args: [], env: {}}
decode: {count: 2, args: [], env: {}}
ports: {engines: 0, side_channels: 0}   # first of consecutive ports; 0 takes free ones at start
run_dir: .coterie            # logs and generated files
ready_timeout_s: 600
experts: {servers: 4, replicas: 2, args: [], env: {}, monitor_port: 0}  # expert servers for embedded engines; optional
gateway: {decode_policy: least_load}    # keys of `coterie serve`, without the workers; optional
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from coterie.errors import ConfigError
from coterie.gateway.config import load_config

EngineName = Literal["vllm", "embedded"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

_MAX_ENGINES = 256
_WORKERS = {"prefill": ("http://127.0.0.1:1",), "decode": ("http://127.0.0.1:2",)}
"""Stand in for the workers while the gateway's other keys are checked."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Engines of one role.

    Attributes:
        count: how many.
        args: arguments added to the engine's command line, after coterie's own (the last one wins).
        env: environment variables added for the engine, after coterie's own.
    """

    count: int
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Expert servers, whose clients the engines are, and their monitor.

    Attributes:
        servers: how many.
        replicas: how many of them have each expert.
        monitor_port: of the monitor; 0 takes a free one.
        args: arguments added to the servers' command line, after coterie's own (the last one wins).
        env: environment variables added for the servers.
    """

    servers: int
    replicas: int = 1
    monitor_port: int = 0
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A local cluster; the module's docstring shows the file it is read from.

    Attributes:
        model: folder of the checkpoint, or its name on a model hub.
        served_model_name: what clients call the model.
        prefill: the prefill engines, which return counts; vLLM's run the counts plugin.
        decode: the decode engines; vLLM's run the stock connector alone.
        engine_env: virtual environment of vLLM.
        run_dir: folder for logs and generated files; created, and locked while the cluster runs.
        engine: `vllm`, or `embedded` (see `coterie engine`), which needs no environment of its own.
        engine_port: first of consecutive HTTP ports; 0 takes free ones.
        side_channel_port: first of consecutive ports by which engines hand over KV; 0 takes free ones.
        ready_timeout_s: the longest that the start of one process may take.
        experts: expert servers that compute the engines' experts; None for engines that do so themselves.
        gateway: keys of `coterie serve` without the workers; None starts no gateway.
    """

    model: str
    served_model_name: str
    prefill: PoolConfig
    decode: PoolConfig
    engine_env: Path
    run_dir: Path = Path(".coterie")
    engine: EngineName = "vllm"
    engine_port: int = 0
    side_channel_port: int = 0
    ready_timeout_s: float = 600.0
    experts: ExpertsConfig | None = None
    gateway: Mapping[str, Any] | None = None


def load_cluster_config(path: Path, *, engine_env: Path) -> ClusterConfig:
    """Read a cluster file.

    Args:
        path: the YAML file; paths in it are relative to its folder.
        engine_env: the engine's virtual environment where the file does not name one.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing, of the wrong type or out of range.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return _Section(document, str(path), base=path.parent).cluster(engine_env)


class _Section:
    """A mapping of the file whose keys are taken one by one; what nobody took is an error."""

    def __init__(self, value: object, where: str, *, base: Path) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected keys and values, got {value!r}")
        self._left = dict(value)
        self._where = where
        self._base = base

    def cluster(self, engine_env: Path) -> ClusterConfig:
        ports = self.section("ports", default={})
        engine = self.engine()
        config = ClusterConfig(
            model=self.model(engine),
            served_model_name=self.text("served_model_name"),
            engine=engine,
            prefill=self.section("prefill").pool(),
            decode=self.section("decode").pool(),
            engine_env=self.path("engine_env", default=engine_env),
            run_dir=self.path("run_dir", default=Path(".coterie")),
            engine_port=ports.number("engines", 0, 65535, default=0),
            side_channel_port=ports.number("side_channels", 0, 65535, default=0),
            ready_timeout_s=self.number("ready_timeout_s", 1, 86400, default=600),
            experts=self.experts(engine),
            gateway=self.gateway(),
        )
        ports.finish()
        self.finish()
        return config

    def pool(self) -> PoolConfig:
        pool = PoolConfig(
            count=self.number("count", 1, _MAX_ENGINES), args=self.texts("args"), env=self.text_mapping("env")
        )
        self.finish()
        return pool

    def experts(self, engine: EngineName) -> ExpertsConfig | None:
        if "experts" not in self._left:
            return None
        if engine != "embedded":
            raise ConfigError(f"{self._where}: experts is for engine: embedded; remove it, or choose that engine")
        section = self.section("experts")
        servers = section.number("servers", 1, _MAX_ENGINES)
        config = ExpertsConfig(
            servers=servers,
            replicas=section.number("replicas", 1, servers, default=1),
            monitor_port=section.number("monitor_port", 0, 65535, default=0),
            args=section.texts("args"),
            env=section.text_mapping("env"),
        )
        section.finish()
        return config

    def finish(self) -> None:
        if self._left:
            raise ConfigError(f"{self._where}: unknown key {', '.join(map(repr, self._left))}")

    def take(self, key: str, default: object = None) -> Any:
        value = self._left.pop(key, default)
        if value is None:
            raise ConfigError(f"{self._where}: missing key {key!r}")
        return value

    def section(self, key: str, default: object = None) -> _Section:
        return _Section(self.take(key, default), f"{self._where}: {key}", base=self._base)

    def text(self, key: str, default: object = None) -> str:
        value = self.take(key, default)
        if not isinstance(value, str) or not value:
            raise self._wrong(key, "a text", value)
        return value

    def engine(self) -> EngineName:
        value = self.take("engine", "vllm")
        if value not in ENGINES:
            raise self._wrong("engine", f"one of {', '.join(ENGINES)}", value)
        if value == "embedded" and "engine_env" in self._left:
            raise ConfigError(f"{self._where}: engine_env is for vLLM; remove it, or choose engine: vllm")
        return ENGINES[ENGINES.index(value)]

    def number(self, key: str, least: int, most: int, default: object = None) -> int:
        value = self.take(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(key, f"a whole number from {least} to {most}", value)
        return value

    def path(self, key: str, default: Path) -> Path:
        if key not in self._left:
            return default.resolve()
        return (self._base / self.text(key)).resolve()

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.take(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts (quote numbers)", value)
        return tuple(value)

    def text_mapping(self, key: str) -> Mapping[str, str]:
        value = self.take(key, {})
        if not isinstance(value, Mapping) or not all(isinstance(item, str) for pair in value.items() for item in pair):
            raise self._wrong(key, "names and texts (quote numbers)", value)
        return value

    def gateway(self) -> Mapping[str, Any] | None:
        """The gateway's keys, checked by the gateway's own rules; paths are made absolute."""
        keys = self._left.pop("gateway", None)
        if keys is None:
            return None
        if not isinstance(keys, Mapping):
            raise self._wrong("gateway", "keys and values", keys)
        where = f"{self._where}: gateway"
        for key in _WORKERS.keys() & keys.keys():
            raise ConfigError(f"{where}: {key} is filled in by `coterie up`; remove it")
        try:
            load_config(None, {**keys, **_WORKERS})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        paths = {key: str((self._base / keys[key]).resolve()) for key in ("profile", "trace") if keys.get(key)}
        return {**keys, **paths}

    def model(self, engine: EngineName) -> str:
        value = self.text("model")
        folder = self._base / value
        if folder.is_dir():
            return str(folder.resolve())
        if engine == "embedded" or value.startswith((".", "/")):
            raise ConfigError(f"{self._where}: model: there is no folder {folder}")
        return value

    def _wrong(self, key: str, expected: str, value: object) -> ConfigError:
        return ConfigError(f"{self._where}: {key} must be {expected}, got {value!r}")
