"""API keys: the file, the ring, the command that makes them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from coterie.cli.key import key as command
from coterie.errors import ConfigError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.edge.access import read_access
from coterie.gateway.edge.keys import Key, KeyRing, load_keys

SECRET = "coterie-0123456789"
HASH = hashlib.sha256(SECRET.encode()).hexdigest()
RING = KeyRing([Key(name="alice", sha256=HASH)])


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER   "])
def test_a_key_is_found_by_what_a_client_shows(scheme: bytes) -> None:
    found = RING.find(scheme + SECRET.encode())
    assert found is not None
    assert found.name == "alice"


@pytest.mark.parametrize(
    "shown",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        SECRET.encode(),
        b"Basic " + SECRET.encode(),
        b"Bearer " + SECRET.encode()[:-1],
        b"Bearer " + SECRET.encode() + b" x",
        b"Bearer " + HASH.encode(),
        b"Bearer \xff" + SECRET.encode(),
        b"Bearer " + b"x" * 600,
    ],
)
def test_nothing_else_is_a_key(shown: bytes | None) -> None:
    assert RING.find(shown) is None


def test_a_key_that_is_made_is_found_by_the_line_that_is_kept_of_it(tmp_path: Path) -> None:
    made = CliRunner().invoke(command, ["new", "bob"])
    secret = made.stderr.split()[-1]
    assert secret not in made.stdout
    file = tmp_path / "keys.yaml"
    file.write_text(made.stdout)
    found = KeyRing(load_keys(file)).find(b"Bearer " + secret.encode())
    assert found == Key(name="bob", sha256=hashlib.sha256(secret.encode()).hexdigest())


def test_no_two_keys_that_are_made_are_alike() -> None:
    assert len({CliRunner().invoke(command, ["new", "bob"]).stdout for _ in range(5)}) == 5


def test_limits_are_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    entry = {"name": "a", "sha256": HASH, "max_in_flight": 2, "requests_per_minute": 3, "tokens_per_minute": 4}
    file.write_text(yaml.safe_dump([entry]))
    assert load_keys(file) == [Key(**entry)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "list of keys"),
        ("[1]", "list of keys"),
        ("[]", "no API key is given"),
        (f"- {{name: a, sha256: {HASH}, limit: 3}}", "unknown fields limit"),
        (f"- {{sha256: {HASH}}}", "name"),
        ("- {name: a, sha256: abc}", "key a: sha256"),
        (f"- {{name: a, sha256: {HASH.upper()}}}", "key a: sha256"),
        (f"- {{name: '', sha256: {HASH}}}", "a name is"),
        (f"- {{name: a, sha256: {HASH}, max_in_flight: 0}}", "key a: max_in_flight must be at least 1, got 0"),
        (f"- {{name: a, sha256: {HASH}, tokens_per_minute: x}}", "tokens_per_minute"),
        (f"- {{name: a, sha256: {HASH}}}\n- {{name: b, sha256: {HASH}}}", "key b"),
        (f"- {{name: a, sha256: {HASH}}}\n- {{name: a, sha256: {'f' * 64}}}", "key a"),
        ("- [", "keys.yaml"),
    ],
)
def test_what_is_wrong_with_a_key_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        KeyRing(load_keys(file))


def configured(**settings: str) -> GatewayConfig:
    return GatewayConfig(prefill=("http://a:1",), decode=("http://b:1",), **settings)


def test_a_key_may_come_from_the_environment_beside_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{name: alice, sha256: {HASH}}}")
    access = read_access(configured(api_keys=str(file), api_key_env="KEY"), {"KEY": "sixteen-letters-"})
    assert access.keys is not None
    names = [
        found.name for shown in (SECRET, "sixteen-letters-") if (found := access.keys.find(f"Bearer {shown}".encode()))
    ]
    assert names == ["alice", "KEY"]


def test_the_workers_key_is_a_header_of_what_they_are_sent() -> None:
    access = read_access(configured(worker_key_env="W"), {"W": "short"})
    assert access.worker_headers == b"authorization: Bearer short\r\n"
    assert not access.passes_authorization


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("api_key_env", None),
        ("api_key_env", "too-short"),
        ("api_key_env", "with a space in it"),
        ("worker_key_env", "a\r\nb: c"),
    ],
)
def test_a_variable_that_holds_no_key_is_named_and_not_shown(setting: str, value: str | None) -> None:
    with pytest.raises(ConfigError, match=r"^\$V: ") as error:
        read_access(configured(**{setting: "V"}), {} if value is None else {"V": value})
    assert value is None or value not in str(error.value)
