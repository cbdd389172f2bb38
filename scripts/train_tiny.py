#!/usr/bin/env python3
"""Make the model coterie-tiny from pinned sources: fetch, train, measure, write its card.

    python scripts/train_tiny.py [--output models/coterie-tiny] [--work build/coterie-tiny]

Needs coterie's dependencies, torch, transformers, gzip, and apt-get on Debian 12, or the packages put into
`WORK/sources` by hand.  One thread; about half an hour on an idle core.  The training is saved every 100 steps
and goes on from there when the command is run again; once it is finished only the measuring is repeated.

With `--fixtures FOLDER` the recorded traces are also written there, and those of `--compare CHECKPOINT` on the
same prompts.  The exit status is 1 if a source is not as pinned or the model routes less locally than it should.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))  # this tree's coterie, whatever is installed

from tiny.settings import NAME, Settings  # noqa: E402
from tiny.sources import SourceError  # noqa: E402


def main() -> int:
    options = _parse()
    from tiny.make import Options, make  # loads torch, for which --help need not wait

    try:
        missed = make(
            Options(options.output, options.work, Settings(steps=options.steps), options.fixtures, options.compare)
        )
    except (SourceError, ValueError) as error:
        print(f"train_tiny: {error}", file=sys.stderr)
        return 1
    for shortfall in missed:
        print(f"train_tiny: not good enough: {shortfall}", file=sys.stderr)
    return 1 if missed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "models" / NAME, help="folder to replace")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / NAME, help="folder for all else")
    parser.add_argument("--steps", type=int, default=Settings().steps, help="of training; fewer for a trial")
    parser.add_argument("--fixtures", type=Path, help="folder to write compressed traces to")
    parser.add_argument("--compare", type=Path, help="another checkpoint to record on the same prompts")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
