"""Prompts of exact length, with a tokenizer of one token a word."""

from __future__ import annotations

import re

import pytest
from tiny.corpus import Document
from tiny.prompts import choose_prompts, windows


def encode(text: str) -> list[str]:
    return re.findall(r"\S+\s*", text)


def decode(ids: list[str]) -> str:
    return "".join(ids)


def document(name: str, lines: int) -> Document:
    """Lines of three words each."""
    return Document(name, "".join(f"{name} {i} x\n" for i in range(lines)))


def test_windows_begin_with_a_line_and_do_not_overlap() -> None:
    text = document("a", 6).text  # 18 words: 4 are a line and a third, so the next window begins two lines later
    assert list(windows(text, encode, decode, 4)) == ["a 0 x\na ", "a 2 x\na ", "a 4 x\na "]


def test_a_window_that_encodes_otherwise_is_passed_over() -> None:
    def cut(text: str) -> list[str]:
        """Joins the words of the first window, as a cut word could be."""
        return [text] * 4 if text == "a 0 x\na " else encode(text)

    assert list(windows(document("a", 6).text, cut, decode, 4)) == ["a 2 x\na ", "a 4 x\na "]


def test_a_window_that_cuts_a_character_is_passed_over() -> None:
    def lossy(ids: list[str]) -> str:
        return decode(ids).replace("a 0", "a \N{REPLACEMENT CHARACTER}")

    assert list(windows(document("a", 4).text, encode, lossy, 4)) == ["a 2 x\na "]


def test_documents_take_turns() -> None:
    documents = [document("a", 8), document("b", 2), document("c", 4)]
    chosen = choose_prompts("code", documents, encode, decode, 5, 4)
    assert [prompt[:3] for prompt in chosen] == ["a 0", "b 0", "c 0", "a 2", "c 2"]


def test_the_same_text_is_one_prompt() -> None:
    twice = [document("a", 2), document("a", 2)]
    with pytest.raises(ValueError, match="domain code: 2 held-out documents hold 1 prompts, not 2"):
        choose_prompts("code", twice, encode, decode, 2, 4)
