"""The configuration: flags over file over defaults, nothing ignored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie.gateway.config import FIELDS, GatewayConfig, changed, load_config

URLS = {"prefill": ("http://a:1",), "decode": ("http://b:1",)}


def test_a_flag_counts_more_than_the_file_and_the_file_more_than_the_default(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("prefill: [http://a:1]\ndecode: [http://b:1, http://b:2]\nport: 5\ntau: 1\nshutdown_grace_s: 3\n")
    config = load_config(file, {"port": 6})
    assert config.decode == ("http://b:1", "http://b:2")
    assert (config.port, config.tau, config.shutdown_grace_s, config.admin_port) == (6, 1.0, 3.0, 8001)


def test_the_decode_policy_follows_the_profile_unless_it_is_given() -> None:
    assert load_config(None, URLS).resolved_decode_policy == "marginal"
    assert load_config(None, {**URLS, "profile": "p"}).resolved_decode_policy == "locality"
    assert load_config(None, {**URLS, "profile": "p", "decode_policy": "random"}).resolved_decode_policy == "random"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prefil: []", "unknown keys prefil"),
        ("- 1", "mapping"),
        ("a: [", "serve.yaml"),
        ("port: x\nprefill: [http://a:1]\ndecode: [http://b:1]", "port"),
        ("port: 70000\nprefill: [http://a:1]\ndecode: [http://b:1]", "65535"),
        ("idle_timeout_s: 0\nprefill: [http://a:1]\ndecode: [http://b:1]", "idle_timeout_s"),
        ("on_mismatch: maybe\nprefill: [http://a:1]\ndecode: [http://b:1]", "on_mismatch"),
        ("decode: [http://b:1]", "--prefill"),
        ("prefill: [http://a:1, http://a:1/]\ndecode: [http://b:1]", "twice"),
        ("prefill: [ftp://a:1]\ndecode: [http://b:1]", "ftp://a:1"),
        ("prefill: ['http://a:x']\ndecode: [http://b:1]", "http://a:x"),
        ("prefill: ['http://a:0']\ndecode: [http://b:1]", "http://a:0"),
        ("prefill: ['http://:secret@a:1']\ndecode: [http://b:1]", "without user"),
        ("peer: [a]\nprefill: [http://a:1]\ndecode: [http://b:1]", "peer: URL 'a'"),
        ("peer: [http://c:1, http://c:1/]\nprefill: [http://a:1]\ndecode: [http://b:1]", "peer: .* twice"),
        ("exchange_s: 2\nprefill: [http://a:1]\ndecode: [http://b:1]", "peer_timeout_s: 5 is less than 3 times"),
        ("prefill: ['http://a:1/b c']\ndecode: [http://b:1]", "' ' cannot be part of a URL"),
        ('prefill: ["http://a:1/\\r\\nx: y"]\ndecode: [http://b:1]', "cannot be part of a URL"),
        (f"prefill: ['http://{64 * 'a'}:1']\ndecode: [http://b:1]", "is no name of a host"),
        ("prefill: ['http://a..b:1']\ndecode: [http://b:1]", "is no name of a host"),
        ("prefill: ['http://ä:1']\ndecode: [http://b:1]", "'ä' cannot be part of a URL"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        load_config(file, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config(tmp_path / "none.yaml", {})


def test_a_file_without_end_is_refused_at_the_bound() -> None:
    with pytest.raises(ConfigError, match="larger than"):
        load_config(Path("/dev/zero"), {})


def other_than(value: object) -> object:
    match value:
        case tuple():
            return ("http://c:1",)
        case float():
            return value + 0.1
        case int():
            return value + 1
    return "OTHER"


def test_what_changed_is_told_and_what_is_fixed_may_not() -> None:
    old = GatewayConfig(**URLS, tls_cert="cert.pem")
    assert changed(old, replace(old)) == []
    assert changed(old, replace(old, tau=0.2, log_requests=False)) == ["tau", "log_requests"]
    assert changed(old, replace(old, decode_policy="marginal")) == []  # it is by default
    assert changed(old, replace(old, decode_policy="random")) == ["decode_policy"]
    for name in [name for name, field in FIELDS.items() if field.metadata["fixed"]]:
        other = "::1" if name.endswith("host") else other_than(getattr(old, name))
        with pytest.raises(ConfigError, match=f"^{name}: cannot change from .* restart it"):
            changed(old, replace(old, tau=0.2, **{name: other}))
