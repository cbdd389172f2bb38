"""Pinned packages: fetched, checked, unpacked.  Nothing is downloaded: packages are made here."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from tiny.sources import DOMAINS, SOURCES, Source, SourceError, fetch, read_members

MEMBERS = {"./usr/share/a.txt": b"alpha", "./usr/share/deep/b.txt": b"beta", "./usr/share/c.bin": b"gamma"}


def deb(files: dict[str, bytes], *, suffix: str = "xz") -> bytes:
    """A Debian package with an odd-sized first member, so that padding matters."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=f"w:{suffix}") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    members = {"debian-binary": b"2.0", f"data.tar.{suffix}": packed.getvalue()}
    return b"!<arch>\n" + b"".join(_member(name, data) for name, data in members.items())


def _member(name: str, data: bytes) -> bytes:
    header = f"{name:<16}{'0':<12}{'0':<6}{'0':<6}{'100644':<8}{len(data):<10}`\n".encode()
    return header + data + b"\n" * (len(data) % 2)


def source(package: bytes, **changes: str) -> Source:
    digest = hashlib.sha256(package).hexdigest()
    pinned = Source("kjv", "no-such-package", "1:2.0-3", "all", digest, "./usr/share/*.txt", "a text", "CC0-1.0")
    return replace(pinned, **changes)


def stored(folder: Path, package: bytes) -> Path:
    path = folder / "no-such-package_1%3a2.0-3_all.deb"
    path.write_bytes(package)
    return path


def test_a_package_that_is_there_is_not_downloaded(tmp_path: Path) -> None:
    package = deb(MEMBERS)
    path = stored(tmp_path, package)
    assert fetch(source(package), tmp_path) == path


def test_a_package_with_another_digest_is_refused_by_domain_and_file(tmp_path: Path) -> None:
    path = stored(tmp_path, deb(MEMBERS) + b"x")
    with pytest.raises(SourceError, match=rf"source kjv: {path} has SHA-256 \w{{64}}, not \w{{64}}; delete it"):
        fetch(source(deb(MEMBERS)), tmp_path)


def test_without_apt_the_error_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceError, match=r"source kjv: there is no apt-get.*put no-such-package_1%3a2.0-3_all.deb"):
        fetch(source(deb(MEMBERS)), tmp_path)


def test_what_apt_says_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text('#!/bin/sh\necho "E: Version not found for $2" >&2\nexit 100\n')
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said = r"source kjv: apt-get download no-such-package=1:2.0-3 failed: E: Version not found for no-such-package=1:2"
    with pytest.raises(SourceError, match=said):
        fetch(source(deb(MEMBERS)), tmp_path)


@pytest.mark.parametrize("suffix", ["xz", "gz"])
def test_members_are_those_that_match_by_name(tmp_path: Path, suffix: str) -> None:
    package = deb(MEMBERS, suffix=suffix)
    found = read_members(source(package), stored(tmp_path, package))
    assert found == {"./usr/share/a.txt": b"alpha", "./usr/share/deep/b.txt": b"beta"}


def test_a_package_without_such_members_is_refused(tmp_path: Path) -> None:
    package = deb(MEMBERS)
    with pytest.raises(SourceError, match=r"source kjv: .* holds no \./usr/lib/\*"):
        read_members(source(package, members="./usr/lib/*"), stored(tmp_path, package))


@pytest.mark.parametrize(
    "damaged",
    [b"", b"<html>", deb(MEMBERS)[:100], deb(MEMBERS)[:-40], b"!<arch>\n" + b"?" * 60],
    ids=["empty", "other", "cut early", "cut late", "bad header"],
)
def test_what_is_no_package_is_refused(tmp_path: Path, damaged: bytes) -> None:
    with pytest.raises(SourceError, match=r"source kjv: .* is not a Debian package: "):
        read_members(source(damaged), stored(tmp_path, damaged))


def test_every_domain_has_one_pinned_and_licensed_source() -> None:
    assert tuple(one.domain for one in SOURCES) == DOMAINS
    for one in SOURCES:
        assert len(bytes.fromhex(one.sha256)) == 32
        assert one.version
        assert one.licence
