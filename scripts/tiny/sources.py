"""The pinned sources of the training text: Debian packages, fetched by apt and checked by SHA-256."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

_AR_MAGIC = b"!<arch>\n"
_AR_HEADER = 60
_MOST_UNPACKED = 1 << 28  # the largest package unpacks to 60 MB


class SourceError(Exception):
    """A source cannot be fetched or is not the pinned one."""


@dataclass(frozen=True, slots=True)
class Source:
    """One package, and what is taken from it.

    Attributes:
        domain: the domain whose text it holds.
        package, version, architecture: its name in Debian 12.
        sha256: of the package file, 64 hexadecimal digits.
        members: pattern of the file names (as in the archive: `./usr/...`) that hold the text.
        work: what the text is.
        licence: SPDX name of the text's licence, or its plain name.
    """

    domain: str
    package: str
    version: str
    architecture: str
    sha256: str
    members: str
    work: str
    licence: str

    @property
    def file(self) -> str:
        """Name under which apt stores the package."""
        return f"{self.package}_{self.version.replace(':', '%3a')}_{self.architecture}.deb"


_HELP_VERSION = "4:7.4.7-1+deb12u14"


def _help(domain: str, folder: str, language: str, sha256: str) -> Source:
    package = f"libreoffice-help-{folder.lower()}"
    members = f"./usr/share/libreoffice/help/{folder}/text/*.html"
    return Source(
        domain, package, _HELP_VERSION, "all", sha256, members, f"LibreOffice 7.4 help, {language}", "MPL-2.0"
    )


SOURCES = (
    Source(
        "code",
        "libpython3.11-stdlib",
        "3.11.2-6+deb12u8",
        "amd64",
        "890b3540dad8a1ccc0deeca025db735bcc82629a76adacbe3b50fcc06ed528ca",
        "./usr/lib/python3.11/*.py",
        "CPython 3.11.2 standard library",
        "PSF-2.0",
    ),
    Source(
        "math",
        "metamath-databases",
        "0.0.0~20210101.git55fe226-2",
        "all",
        "c72523c221db6c1039fa909150f9c53fb9175809792f2e80e55e1baa965445a1",
        "./usr/share/metamath/databases/set.mm",
        "set.mm of metamath, statements and comments without proofs",
        "CC0-1.0",
    ),
    Source(
        "dictionary",
        "wordnet-base",
        "1:3.0-37",
        "all",
        "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
        "./usr/share/wordnet/data.*",
        "WordNet 3.0 glosses",
        "WordNet 3.0 licence",
    ),
    Source(
        "kjv",
        "bible-kjv-text",
        "4.38",
        "all",
        "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a",
        "./usr/lib/bible.data",
        "King James Version of the Bible",
        "public domain",
    ),
    _help("fr", "fr", "French", "c796530d3e95af1ea4d054076682efc8aad2b569ae9513f3d4a776b2df3fd206"),
    _help("de", "de", "German", "00490b63c509ac96f7f212d6a6e40452d3e0d1f97ccf4b824dd5ec4c01e8277f"),
    _help("ru", "ru", "Russian", "5a2f75d5b0dfcf660275070647af528a81be28b5d3e9c3ec2d419ef5518db7a2"),
    _help("zh", "zh-CN", "Chinese", "db867cdece4c2f9c7eebe65e519c6cf386fdcf49d6e061db3dffec893b3e1dee"),
)
TASKS = ("code", "math", "dictionary", "kjv")
LANGUAGES = ("fr", "de", "ru", "zh")
DOMAINS = TASKS + LANGUAGES


def fetch(source: Source, folder: Path) -> Path:
    """The package's file in `folder`, downloaded by apt where it is not there yet.

    Raises:
        SourceError: apt cannot download it, or its SHA-256 is not the pinned one.
    """
    path = folder / source.file
    if not path.exists():
        _download(source, folder)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise SourceError(f"source {source.domain}: {path} has SHA-256 {digest}, not {source.sha256}; delete it")
    return path


def _download(source: Source, folder: Path) -> None:
    by_hand = f"put {source.file} (SHA-256 {source.sha256}), from Debian 12 or its snapshot archive, into {folder}"
    architecture = "" if source.architecture == "all" else f":{source.architecture}"
    command = ["apt-get", "download", f"{source.package}{architecture}={source.version}"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise SourceError(f"source {source.domain}: there is no apt-get here to fetch it; {by_hand}") from None
    if done.returncode or not (folder / source.file).exists():
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SourceError(f"source {source.domain}: {' '.join(command)} failed: {said}; {by_hand}")


def read_members(source: Source, path: Path) -> dict[str, bytes]:
    """The package's files whose names match `source.members`, by name in ascending order.

    Raises:
        SourceError: the file is no Debian package, or holds no such member.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(_data_of(path.read_bytes()))) as archive:
            chosen = sorted(_matching(archive, source.members), key=lambda member: member.name)
            if sum(member.size for member in chosen) > _MOST_UNPACKED:
                raise SourceError(f"source {source.domain}: {path} unpacks to more than {_MOST_UNPACKED} bytes")
            files = {member.name: archive.extractfile(member).read() for member in chosen}  # type: ignore[union-attr]
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise SourceError(f"source {source.domain}: {path} is not a Debian package: {error}") from None
    if not files:
        raise SourceError(f"source {source.domain}: {path} holds no {source.members}")
    return files


def _matching(archive: tarfile.TarFile, pattern: str) -> Iterator[tarfile.TarInfo]:
    return (member for member in archive if member.isfile() and fnmatchcase(member.name, pattern))


def _data_of(package: bytes) -> bytes:
    """The member `data.tar.*` of an ar archive: 60-byte headers, members padded to even length."""
    if not package.startswith(_AR_MAGIC):
        raise ValueError("no ar archive")
    at = len(_AR_MAGIC)
    while at + _AR_HEADER <= len(package):
        header = package[at : at + _AR_HEADER]
        size = int(header[48:58])
        at += _AR_HEADER
        if header.startswith(b"data.tar"):
            if at + size > len(package):
                raise ValueError("cut short")
            return package[at : at + size]
        at += size + size % 2
    raise ValueError("no member data.tar")
