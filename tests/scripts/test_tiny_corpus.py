"""From files to documents, and their division."""

from __future__ import annotations

import shutil
import struct
import subprocess
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny.corpus import (
    CHUNK_CHARACTERS,
    Document,
    chunks,
    page_lines,
    read_code,
    read_dictionary,
    read_help,
    read_kjv,
    read_math,
    split,
)
from tiny.sources import SourceError

DOCUMENTS = [Document(f"page {i}", "x" * 10) for i in range(40)]


@given(st.integers(0, 10_000))
def test_documents_divide_alike_in_whatever_order_they_come(seed: int) -> None:
    shuffled = Random(seed).sample(DOCUMENTS, len(DOCUMENTS))
    assert split(shuffled, held_bytes=95, train_bytes=150) == split(DOCUMENTS, held_bytes=95, train_bytes=150)


def test_each_side_ends_with_the_document_that_reaches_its_size() -> None:
    found = split(DOCUMENTS, held_bytes=95, train_bytes=150)
    assert (len(found.held), len(found.train)) == (10, 15)  # 10 bytes each: 95 needs ten, 150 fifteen


def test_no_document_is_on_both_sides() -> None:
    found = split(DOCUMENTS, held_bytes=95, train_bytes=1000)
    assert len(found.train) == 30
    assert not set(found.train) & set(found.held)


@given(st.lists(st.text("ab", max_size=CHUNK_CHARACTERS), max_size=8))
def test_chunks_lose_and_reorder_nothing(units: list[str]) -> None:
    assert [unit for document in chunks("f", units, "\n") for unit in document.text.split("\n")] == units


def test_a_chunk_ends_with_the_unit_that_fills_it() -> None:
    units = ["a" * (CHUNK_CHARACTERS - 1), "b", "c"]
    assert [(one.name, len(one.text)) for one in chunks("f", units, "")] == [("f/0", CHUNK_CHARACTERS), ("f/1", 1)]


def test_code_leaves_out_tables_help_texts_and_files_that_say_little() -> None:
    long = b"x = 1\n" * 300
    files = {"./a.py": long, "./encodings/b.py": long, "./pydoc_data/c.py": long, "./d.py": b"pass\n"}
    assert read_code(files) == [Document("./a.py", long.decode())]


def test_math_keeps_statements_and_comments_but_no_proofs() -> None:
    text = b"about the file\n$c ( ) $.\n\n  $( One\n     step. $)\n  a1 $p |- ( ph ) $=\n    ( b c ) ABC $.\n"
    [document] = read_math({"set.mm": text})
    assert document.text == "$c ( ) $.\n\n $( One\n step. $)\n a1 $p |- ( ph ) $.\n"


def test_dictionary_lists_the_words_of_a_synset_before_its_gloss() -> None:
    licence = b"  1 This software and database is being provided to you\n"
    adjective = b'00001740 00 s 02 able(p) 0 well_off 0 001 = 05200169 n 0000 | having means; "able to swim"  \n'
    # the number of words is hexadecimal: 0b is eleven
    many = b"00002452 03 n 0b " + b" ".join(b"w%d 0" % i for i in range(11)) + b" 000 | a thing  \n"
    [one, other] = read_dictionary({"data.adj": licence + adjective, "data.noun": many})
    assert one.text == 'able, well off (adj.): having means; "able to swim"'
    assert other.text == ", ".join(f"w{i}" for i in range(11)) + " (noun): a thing"


def squished(*texts: str) -> bytes:
    """A `bible.data`: a header, an index of windows, and each window as compress(1) writes it, without its magic."""
    windows = [lzw(text.encode()) for text in texts]
    start = 0x58 + 4 * (len(windows) + 2)
    bounds = [start + sum(map(len, windows[:i])) for i in range(len(windows) + 1)]
    return b"EC02".ljust(0x58, b"\0") + struct.pack(f">{len(bounds) + 1}I", len(windows), *bounds) + b"".join(windows)


def lzw(data: bytes) -> bytes:
    """Literal codes of 9 bits, lowest bit first; enough for texts of fewer than 255 bytes."""
    assert len(data) < 255
    bits = sum(byte << (9 * i) for i, byte in enumerate(data))
    return bits.to_bytes(-(-9 * len(data) // 8), "little")


needs_gzip = pytest.mark.skipif(shutil.which("gzip") is None, reason="gzip reads the windows")


@needs_gzip
def test_kjv_makes_a_document_of_each_chapter_across_windows() -> None:
    data = squished("Holy Bible.\nGe1:1 In the begin", "ning.\nGe1:2 And.\nGe2:1 Thus.\n")
    assert read_kjv({"bible.data": data}) == [
        Document("Ge1", "1 In the beginning.\n2 And.\n"),
        Document("Ge2", "1 Thus.\n"),
    ]


@needs_gzip
def test_a_damaged_bible_is_an_error_that_names_the_source() -> None:
    damaged = bytearray(squished("Ge1:1 In the beginning.\n"))
    damaged[-20:] = b"\xff" * 20
    with pytest.raises(SourceError, match="source kjv: gzip cannot read the window at byte 100"):
        read_kjv({"bible.data": bytes(damaged)})
    with pytest.raises(SourceError, match="source kjv: damaged index"):
        read_kjv({"bible.data": b"EC02"})


PAGE = """<html><body><div>menu</div><div id="DisplayArea"><h1>Title</h1><p>One <b>bold</b>
 word &amp; more</p><script>var x;</script><ul><li>first</li><li> </li></ul></div>
<footer>imprint</footer></body></html>"""


def test_a_page_is_its_main_part_one_line_for_each_block() -> None:
    assert page_lines(PAGE) == ["Title", "One bold word & more", "first"]


def page(*lines: str) -> bytes:
    return ('<div id="DisplayArea">' + "".join(f"<p>{line}</p>" for line in lines) + "</div>").encode()


def test_help_drops_lines_of_two_languages_and_of_many_pages_then_short_pages() -> None:
    body = {word: f"{word} " * 200 for word in ("ein", "une", "zwei")}
    german = {f"de/{i}": page("Hinweis", f"{body['ein']}{i}") for i in range(4)}
    german["de/short"] = page("kurz")
    french = {"fr/0": page(body["une"], "=SUM(A1)"), "fr/1": page("=SUM(A1)", body["zwei"])}
    german["de/5"] = page("=SUM(A1)", body["zwei"])  # both lines are French pages' too: nothing is left
    found = read_help({"de": german, "fr": french})
    assert found["fr"] == [Document("fr/0", body["une"].strip() + "\n")]
    assert found["de"] == [Document(f"de/{i}", f"{body['ein']}{i}\n") for i in range(4)]


@needs_gzip
def test_the_windows_of_this_test_are_what_gzip_reads() -> None:
    done = subprocess.run(["gzip", "-dc"], input=b"\x1f\x9d\x90" + lzw(b"hello"), capture_output=True)
    assert done.stdout == b"hello"
