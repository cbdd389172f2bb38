#!/usr/bin/env python3
"""Write the prompts of the demo: held-out text of the domains that coterie-tiny was trained on.

    python scripts/demo_prompts.py [--model models/coterie-tiny] [--sources build/coterie-tiny/sources]

Half of each domain's held-out documents give the prompts to calibrate with, the other half those to serve, so
that no document is in both files.  Needs the packages of `scripts/train_tiny.py` (fetched by apt-get on Debian 12
where they are not in SOURCES), `tokenizers` and gzip.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tiny.corpus import Document, read_documents, split
from tiny.prompts import choose_prompts
from tiny.settings import NAME
from tiny.sources import DOMAINS, SOURCES, SourceError, fetch, read_members
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = {"calibrate": 64, "serve": 72}  # of each domain; a skewed mix serves many of one
TOKENS = 64  # of each prompt


def main() -> int:
    options = _parse()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    try:
        options.sources.mkdir(parents=True, exist_ok=True)
        packages = {source.domain: read_members(source, fetch(source, options.sources)) for source in SOURCES}
        held = {domain: split(documents).held for domain, documents in read_documents(packages).items()}
        for number, (name, count) in enumerate(PROMPTS.items()):
            lines = _lines({domain: held[domain][number::2] for domain in DOMAINS}, count, tokenizer)
            (options.output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    except (SourceError, ValueError) as error:
        print(f"demo_prompts: {error}", file=sys.stderr)
        return 1
    return 0


def _lines(documents: Mapping[str, Sequence[Document]], count: int, tokenizer: Tokenizer) -> Iterator[str]:
    def encode(text: str) -> Sequence[int]:
        return tokenizer.encode(text).ids

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids))

    for domain, some in documents.items():
        for prompt in choose_prompts(domain, some, encode, decode, count, TOKENS):
            yield json.dumps({"prompt": prompt, "label": domain}, ensure_ascii=False) + "\n"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / NAME, help="whose tokenizer counts the tokens")
    parser.add_argument(
        "--sources", type=Path, default=ROOT / "build" / NAME / "sources", help="folder of the packages"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "examples" / "demo", help="folder to write to")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
