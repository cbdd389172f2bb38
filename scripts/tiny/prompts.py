"""Prompts of an exact number of tokens from held-out documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from tiny.corpus import Document

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]

_CHARACTERS_PER_TOKEN = 16  # more than a prompt's tokens have on average in any domain


def choose_prompts(
    domain: str, documents: Sequence[Document], encode: Encode, decode: Decode, count: int, length: int
) -> list[str]:
    """`count` prompts of `length` tokens: the first of each document, then the second of each, and so on.

    Raises:
        ValueError: the documents hold fewer.
    """
    by_document = [windows(document.text, encode, decode, length) for document in documents]
    found = [prompt for round_ in zip_longest(*by_document) for prompt in round_ if prompt is not None]
    unique = list(dict.fromkeys(found))
    if len(unique) < count:
        raise ValueError(
            f"domain {domain}: {len(documents)} held-out documents hold {len(unique)} prompts, not {count}"
        )
    return unique[:count]


def windows(text: str, encode: Encode, decode: Decode, length: int) -> Iterator[str]:
    """Stretches of a text that begin with a line, do not overlap and encode to exactly `length` tokens.

    Cutting between tokens may cut a character, or make the last word encode otherwise; such a stretch is passed over.
    """
    while True:
        ids = encode(text[: length * _CHARACTERS_PER_TOKEN])[:length]
        if len(ids) < length:
            return
        prompt = decode(ids)
        if text.startswith(prompt) and list(encode(prompt)) == list(ids):
            yield prompt
        line_end = text.find("\n", len(prompt))
        if line_end < 0:
            return
        text = text[line_end + 1 :]
