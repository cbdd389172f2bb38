"""The gateway's configuration: one frozen value; the same names as flags and as YAML keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from coterie.core import Role
from coterie.errors import ConfigError
from coterie.files import read_text
from coterie.gateway.edge.tls import is_loopback
from coterie.gateway.urls import split_url
from coterie.routing.shared_load import MOST_ROWS

MAX_CONFIG_BYTES = 1 << 20

LEAST_MESSAGES = 3
"""Messages of a peer that are due before it is forgotten."""


def _option(default: Any, text: str, *, fixed: bool = False) -> Any:
    """A setting; one that is fixed cannot change while the gateway runs."""
    return dataclasses.field(default=default, metadata={"help": text, "fixed": fixed})


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What `coterie serve` needs to know.  Each field's help text is its documentation."""

    prefill: tuple[str, ...] = _option((), "URL of a prefill worker; repeat for each.")
    decode: tuple[str, ...] = _option((), "URL of a decode worker; repeat for each.")
    prefill_policy: str = _option("prefix", "How prefill workers are chosen.")
    decode_policy: str | None = _option(
        None, "How decode workers are chosen; locality if --profile is given, else marginal."
    )
    profile: str | None = _option(None, "Routing profile, as written by `coterie fit`.")
    trace: str | None = _option(None, "Labelled activation trace, for --decode-policy domain.")
    tau: float = _option(0.1, "Width of the locality band: similarity to give up for a less loaded worker.")
    refit_window_s: float = _option(
        5.0, "How far back requests are that locality_refit and locality_adaptive refit centroids to, twice a window."
    )
    kv_limit: float | None = _option(
        None, "Pass over decode workers whose KV cache is fuller than this part, 0 to 1, while another is not."
    )
    pass_over_queues: bool = _option(
        False, "Pass over decode workers where requests wait for room, while none waits at another."
    )
    reading_interval_s: float = _option(
        1.0, "Time between two readings of each decode worker's metrics, for --kv-limit and --pass-over-queues."
    )
    split_above_bytes: int | None = _option(
        None, "Have the decode worker compute prompts of at most so many bytes of JSON, too; by default none."
    )
    on_mismatch: Literal["error", "load"] = _option(
        "error", "Profile that does not fit the workers: refuse to start, or route by load only."
    )
    host: str = _option("127.0.0.1", "Address to serve clients on.", fixed=True)
    port: int = _option(8000, "Port to serve clients on.", fixed=True)
    admin_host: str = _option("127.0.0.1", "Address of the admin side (metrics, workers, decisions).", fixed=True)
    admin_port: int = _option(8001, "Port of the admin side.", fixed=True)
    processes: int = _option(1, "Processes that serve clients on the one port, at most 64.", fixed=True)
    peer: tuple[str, ...] = _option(
        (), "Admin URL of another gateway of the same workers, to exchange load with; repeat for each.", fixed=True
    )
    exchange_s: float = _option(
        1.0, "Longest time between two messages to a peer; changes are told within a quarter of it.", fixed=True
    )
    peer_timeout_s: float = _option(
        5.0, "How long what a peer said counts if nothing else comes; at least 3 times --exchange-s.", fixed=True
    )
    seed: int = _option(0, "Seed of the policies' random choices.", fixed=True)
    default_output_tokens: int = _option(256, "Output tokens to expect of a request that sets no limit.")
    keep_sessions: int = _option(
        10_000,
        "Conversations (X-Coterie-Session) whose decode worker is remembered; 0 to choose anew at each turn.",
        fixed=True,
    )
    api_keys: str | None = _option(None, "File with clients' API keys, as `coterie key new` prints them; see security.")
    api_key_env: str | None = _option(None, "Environment variable that holds an API key for clients.", fixed=True)
    tls_cert: str | None = _option(None, "PEM file with the certificate, and chain, to show clients.", fixed=True)
    tls_key: str | None = _option(None, "PEM file with its private key, if it is not in the same file.", fixed=True)
    worker_ca: str | None = _option(
        None, "PEM file with the certificates that vouch for https workers; by default the system's.", fixed=True
    )
    admin_tls: bool = _option(False, "Use TLS on the admin side, too.", fixed=True)
    admin_key_env: str | None = _option(
        None, "Environment variable that holds the key of the admin side; needed beyond this machine.", fixed=True
    )
    worker_key_env: str | None = _option(
        None, "Environment variable that holds the API key that workers want.", fixed=True
    )
    max_in_flight: int = _option(
        0, "Requests that may be at workers at once; others wait. 0 for no bound: only you know what the workers hold."
    )
    max_queue: int = _option(1000, "Requests that may wait for --max-in-flight; one more is refused with 503.")
    queue_timeout_s: float = _option(30.0, "How long a request may wait for its turn; then it is refused with 503.")
    keep_decisions: int = _option(256, "Decisions kept for the admin side.", fixed=True)
    log_requests: bool = _option(True, "Log one line per request; never its content.")
    startup_timeout_s: float = _option(60.0, "How long to wait for a worker of each role at start.", fixed=True)
    removal_grace_s: float = _option(300.0, "How long requests of a worker that was removed may go on.")
    shutdown_grace_s: float = _option(30.0, "How long running requests may go on after SIGTERM.")
    connect_timeout_s: float = _option(5.0, "How long a worker may take to accept a connection.")
    prefill_timeout_s: float = _option(300.0, "How long a prefill worker may take to answer.")
    first_byte_timeout_s: float = _option(300.0, "How long a decode worker may take to begin its answer.")
    idle_timeout_s: float = _option(120.0, "How long a worker may pause within an answer.")
    request_timeout_s: float = _option(1800.0, "How long a request may take from its arrival to the end of its answer.")
    max_handoff_s: float = _option(
        25.0, "Age of a finished prefill at which it is done again, not decoded; less than workers keep its KV (30 s)."
    )
    retries: int = _option(2, "How often a request that a worker failed is sent to another.")
    continue_streams: bool = _option(True, "Have streams go on at another worker where their decode worker is lost.")
    continue_sampled: bool = _option(True, "The same for streams with a temperature; if not, they end with an error.")
    continuations: int = _option(3, "How often one stream goes on at another worker.")
    continue_max_tokens: int = _option(
        131_072, "Tokens of a prompt, and of an output, up to which a stream can go on at another worker."
    )
    breaker_failures: int = _option(
        3, "Failures in a row after which a worker is sent nothing for a while; a refused connection does so at once."
    )
    breaker_open_s: float = _option(0.5, "How long that is before the worker is tried again; doubled each time.")
    breaker_most_open_s: float = _option(8.0, "To how long that may grow.")
    keep_idle_s: float = _option(4.0, "How long idle worker connections are kept; less than workers keep them.")
    health_interval_s: float = _option(3.0, "Time between two health checks of a worker.")
    health_timeout_s: float = _option(10.0, "How long a health check may take.")
    max_body_bytes: int = _option(64 << 20, "Largest request body; larger ones get 413.")
    max_held_bytes: int = _option(
        1 << 30, "Bytes of all request bodies that are here at once; what is beyond gets 503."
    )
    max_connections: int = _option(10_000, "Connections of clients at once; one more is refused with 503.")
    client_request_timeout_s: float = _option(60.0, "How long a client may take to send a request.")
    client_idle_timeout_s: float = _option(75.0, "How long an idle client connection is kept.")
    client_stall_timeout_s: float = _option(60.0, "How long a client may refuse to take more of its answer.")

    def __post_init__(self) -> None:
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            _check_urls(role, urls)
        for name, value in dataclasses.asdict(self).items():
            if value is not None and name.endswith(("_s", "_bytes", "_tokens")) and not 0 < value < float("inf"):
                raise ConfigError(f"{name}: must be a positive number, got {value!r}")
        if self.max_connections < 1:
            raise ConfigError(f"max_connections: must be at least 1, got {self.max_connections}")
        for name in ("port", "admin_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{name}: must be from 0 to 65535, got {getattr(self, name)}")
        self._check_access()
        self._check_processes()
        self._check_peers()
        if self.kv_limit is not None and not 0 < self.kv_limit <= 1:
            raise ConfigError(f"kv_limit: must be above 0 and at most 1, got {self.kv_limit}")
        if self.breaker_failures < 1:
            raise ConfigError(f"breaker_failures: must be at least 1, got {self.breaker_failures}")
        if self.breaker_most_open_s < self.breaker_open_s:
            raise ConfigError(f"breaker_most_open_s: {self.breaker_most_open_s:g} is less than breaker_open_s")
        for name in (
            "keep_decisions",
            "keep_sessions",
            "max_in_flight",
            "max_queue",
            "retries",
            "continuations",
            "seed",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}")

    def _check_access(self) -> None:
        if self.tls_cert is None and (self.tls_key is not None or self.admin_tls):
            raise ConfigError("tls_cert: must be given with tls_key and admin_tls; it is the certificate to show")
        if self.admin_key_env is None and not is_loopback(self.admin_host):
            raise ConfigError(
                f"admin_host: {self.admin_host} is reached from elsewhere, where anybody could change the workers; "
                "give the admin side a key with --admin-key-env, or keep it on 127.0.0.1"
            )

    def _check_processes(self) -> None:
        if not 1 <= self.processes <= MOST_ROWS:
            raise ConfigError(f"processes: must be from 1 to {MOST_ROWS}, got {self.processes}")
        if self.processes > 1:
            self._refuse_refits("processes", "use --processes 1")

    def _check_peers(self) -> None:
        _check_different("peer", self.peer)
        if self.peer_timeout_s < LEAST_MESSAGES * self.exchange_s:
            raise ConfigError(
                f"peer_timeout_s: {self.peer_timeout_s:g} is less than {LEAST_MESSAGES} times exchange_s "
                f"({self.exchange_s:g}): a peer would be forgotten for one late message"
            )
        if self.board_rows > MOST_ROWS:
            raise ConfigError(
                f"peer: {len(self.peer)} peers and {self.processes} processes are too many; twice the former and the "
                f"latter together may be {MOST_ROWS}"
            )
        if self.peer:
            self._refuse_refits("peer", "leave out --peer")

    def _refuse_refits(self, name: str, instead: str) -> None:
        if self.resolved_decode_policy in ("locality_refit", "locality_adaptive"):
            raise ConfigError(
                f"{name}: {self.resolved_decode_policy} refits the centroids of one process; "
                f"{instead}, or --decode-policy locality or marginal"
            )

    @property
    def board_rows(self) -> int:
        """Rows of load: one for each process, two for each peer, since one that started again is another gateway."""
        return self.processes + 2 * len(self.peer)

    def with_workers(self, role: Role, urls: tuple[str, ...]) -> GatewayConfig:
        """The same with other workers of a role.

        Raises:
            ConfigError: there are none, or one is given twice.
        """
        replace = dataclasses.replace
        return replace(self, prefill=urls) if role == "prefill" else replace(self, decode=urls)

    @property
    def resolved_decode_policy(self) -> str:
        """The decode policy in effect."""
        return self.decode_policy or ("locality" if self.profile else "marginal")

    @property
    def reads_workers(self) -> bool:
        """Whether decode workers' metrics are needed."""
        return self.kv_limit is not None or self.pass_over_queues


FIELDS = {field.name: field for field in dataclasses.fields(GatewayConfig)}


def changed(old: GatewayConfig, new: GatewayConfig) -> list[str]:
    """Names of the settings in which two configurations differ.

    Raises:
        ConfigError: one of them is fixed while the gateway runs.
    """
    names = [name for name in FIELDS if _in_effect(old, name) != _in_effect(new, name)]
    for name in names:
        if FIELDS[name].metadata["fixed"]:
            raise ConfigError(
                f"{name}: cannot change from {getattr(old, name)!r} to {getattr(new, name)!r} while the gateway runs; "
                "restart it, or undo that change"
            )
    return names


def _in_effect(config: GatewayConfig, name: str) -> Any:
    return config.resolved_decode_policy if name == "decode_policy" else getattr(config, name)


def _check_urls(role: str, urls: tuple[str, ...]) -> None:
    if not urls:
        raise ConfigError(f"{role}: no worker given; add --{role} http://HOST:PORT")
    _check_different(role, urls)


def _check_different(name: str, urls: tuple[str, ...]) -> None:
    try:
        addresses = [split_url(url) for url in urls]
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    for url, address in zip(urls, addresses, strict=True):
        if addresses.count(address) > 1:
            raise ConfigError(f"{name}: {url} is given twice")


def load_config(file: Path | None, flags: Mapping[str, Any]) -> GatewayConfig:
    """Build the configuration: a flag counts more than the file, the file more than the default.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    values = {**(_read_settings(file) if file else {}), **flags}
    if unknown := sorted(values.keys() - FIELDS):
        raise ConfigError(f"{file}: unknown keys {', '.join(unknown)}; known are {', '.join(FIELDS)}")
    try:
        return msgspec.convert(values, GatewayConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file or 'flags'}: {error}") from None


@dataclass(frozen=True, slots=True)
class Source:
    """Where a configuration comes from, so that it can be read again.

    Attributes:
        file: YAML file; None for none.
        flags: what counts more than the file.
    """

    file: str | None
    flags: Mapping[str, Any]

    def read(self) -> GatewayConfig:
        """See `load_config`."""
        return load_config(Path(self.file) if self.file else None, self.flags)


def read_yaml(file: Path) -> Any:
    """What a YAML file of at most `MAX_CONFIG_BYTES` holds.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return yaml.safe_load(read_text(file, MAX_CONFIG_BYTES))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {error}") from None


def _read_settings(file: Path) -> dict[str, Any]:
    values = read_yaml(file)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{file}: expected a mapping of settings")
    return values
