"""From package files to documents of eight domains, and their division into training and held-out ones."""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import pairwise

from tiny.sources import LANGUAGES, SourceError

Files = Mapping[str, bytes]

CHUNK_CHARACTERS = 6000
HELD_BYTES = 300_000
TRAIN_BYTES = 5_000_000


@dataclass(frozen=True, slots=True)
class Document:
    """One text: a file, a page, a chapter or a run of entries.

    Attributes:
        name: unique in its domain; decides on which side of the split the document falls.
        text: its text.
    """

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Split:
    """The documents of one domain; no document is on both sides."""

    train: tuple[Document, ...]
    held: tuple[Document, ...]


def split(documents: Iterable[Document], *, held_bytes: int = HELD_BYTES, train_bytes: int = TRAIN_BYTES) -> Split:
    """Divide documents in the order of a hash of their names: held-out ones first, then training ones.

    The same documents divide alike in whatever order they come.  Each side ends with the document that
    reaches its size; what is left over is not used.
    """
    ahead = iter(sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest()))
    held = tuple(_take(ahead, held_bytes))
    return Split(train=tuple(_take(ahead, train_bytes)), held=held)


def _take(documents: Iterable[Document], size: int) -> Iterable[Document]:
    taken = 0
    for document in documents:
        yield document
        taken += len(document.text.encode())
        if taken >= size:
            return


def chunks(name: str, units: Iterable[str], separator: str) -> list[Document]:
    """Documents of consecutive units, each ended by the unit that reaches `CHUNK_CHARACTERS`."""
    documents: list[Document] = []
    waiting: list[str] = []
    for unit in units:
        waiting.append(unit)
        if sum(map(len, waiting)) >= CHUNK_CHARACTERS:
            documents.append(Document(f"{name}/{len(documents)}", separator.join(waiting)))
            waiting = []
    if waiting:
        documents.append(Document(f"{name}/{len(documents)}", separator.join(waiting)))
    return documents


# --- one reader for each kind of source -----------------------------------------------------------------


def read_code(files: Files) -> list[Document]:
    """Python files, without tables of characters and the texts of `help()`."""
    texts = {name: data.decode() for name, data in files.items() if not re.search("/(encodings|pydoc_data)/", name)}
    return [Document(name, text) for name, text in texts.items() if 1_000 < len(text) < 200_000]


def read_math(files: Files) -> list[Document]:
    """Metamath statements with their comments; proofs are cut out, indentation is kept to one space."""
    [(name, data)] = files.items()
    text = data.decode()
    text = text[text.index("$c ") :]  # what stands before is about the file
    text = re.sub(r"\s*\$=.*?\$\.", " $.", text, flags=re.DOTALL)
    text = re.sub(r"[ \t]+", " ", text)
    return chunks(name, re.split(r"\n{2,}", text), "\n\n")


_PARTS_OF_SPEECH = {"n": "noun", "v": "verb", "a": "adj.", "s": "adj.", "r": "adv."}


def read_dictionary(files: Files) -> list[Document]:
    """WordNet's synsets, one a line: `word, word (noun): gloss; "example"`."""
    documents = []
    for name, data in files.items():
        lines = [line for line in data.decode().splitlines() if not line.startswith("  ")]  # the licence is indented
        documents += chunks(name, map(_gloss, lines), "\n")
    return documents


def _gloss(line: str) -> str:
    """A line of a WordNet data file (wndb(5)): `offset file type count(hex) [word id]... pointers | gloss`."""
    fields, gloss = line.split(" | ", 1)
    _, _, kind, count, *rest = fields.split(" ")
    words = [re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ") for word in rest[: 2 * int(count, 16) : 2]]
    return f"{', '.join(words)} ({_PARTS_OF_SPEECH[kind]}): {gloss.strip()}"


def read_kjv(files: Files) -> list[Document]:
    """Chapters of the Bible, one verse a line, each after its number."""
    [data] = files.values()
    chapters: dict[str, list[str]] = {}
    for line in _unsquish(data).splitlines():
        if verse := re.match(r"(\w+):(\d+) (.*)", line):
            chapters.setdefault(verse[1], []).append(f"{verse[2]} {verse[3]}\n")
    return [Document(name, "".join(verses)) for name, verses in chapters.items()]


_WINDOWS_AT = 0x58  # big-endian 32 bits: number of windows; then where each begins and the last ends
_COMPRESS = b"\x1f\x9d\x90"


def _unsquish(data: bytes) -> str:
    """The text of a `bible.data`: windows in the format of compress(1), without its magic number."""
    try:
        (windows,) = struct.unpack_from(">I", data, _WINDOWS_AT)
        bounds = struct.unpack_from(f">{windows + 1}I", data, _WINDOWS_AT + 4)
    except struct.error as error:
        raise SourceError(f"source kjv: damaged index: {error}") from None
    parts = []
    for start, end in pairwise(bounds):
        done = subprocess.run(["gzip", "-dc"], input=_COMPRESS + data[start:end], capture_output=True)
        if done.returncode:
            raise SourceError(f"source kjv: gzip cannot read the window at byte {start}: {done.stderr.decode()}")
        parts.append(done.stdout)
    return b"".join(parts).decode("ascii")


_SHORTEST = 600  # bytes of a page
_COMMON = 3  # a line on more pages than this is boilerplate


def read_help(languages: Mapping[str, Files]) -> dict[str, list[Document]]:
    """Pages of LibreOffice's help by language, without lines that many pages or two languages share.

    What is alike in two languages was left untranslated, or is a formula; pages of little else are left out.
    """
    pages = {
        language: {name: page_lines(data.decode()) for name, data in files.items()}
        for language, files in languages.items()
    }
    on_pages = {language: Counter(_lines_of(found)) for language, found in pages.items()}
    in_languages = Counter(line for lines in on_pages.values() for line in lines)

    def kept(language: str, lines: list[str]) -> str:
        own = [line for line in lines if on_pages[language][line] <= _COMMON and in_languages[line] == 1]
        return "".join(f"{line}\n" for line in own)

    documents = {
        language: [Document(name, kept(language, lines)) for name, lines in found.items()]
        for language, found in pages.items()
    }
    return {
        language: [page for page in found if len(page.text.encode()) > _SHORTEST]
        for language, found in documents.items()
    }


def _lines_of(pages: Mapping[str, list[str]]) -> Iterator[str]:
    return (line for lines in pages.values() for line in set(lines))


_BLOCKS = frozenset(
    ("p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "li", "tr", "td", "br", "table", "ul", "ol", "pre")
)
_SILENT = frozenset(("script", "style"))


class _Page(HTMLParser):
    """Collects the text between the start of the element `DisplayArea` and the footer."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._shown = False
        self._silent = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._shown = (self._shown or ("id", "DisplayArea") in attrs) and tag != "footer"
        self._silent = tag in _SILENT
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self._silent = False
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._shown and not self._silent:
            self.text += re.sub(r"\s+", " ", data)

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS:
            self.text += "\n"


def page_lines(html: str) -> list[str]:
    """The visible lines of a help page's main part."""
    page = _Page()
    page.feed(html)
    return [line for line in map(str.strip, page.text.split("\n")) if line]


def read_documents(files: Mapping[str, Files]) -> dict[str, list[Document]]:
    """The documents of every domain, from the files of its package."""
    tasks = {"code": read_code, "math": read_math, "dictionary": read_dictionary, "kjv": read_kjv}
    documents = {domain: read(files[domain]) for domain, read in tasks.items()}
    return documents | read_help({domain: files[domain] for domain in LANGUAGES})
