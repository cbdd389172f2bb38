"""`coterie collect` from one checkpoint after another: collect_checkpoints.py PROMPTS MAX_TOKENS OUT CHECKPOINT...

Writes OUT/NAME.trace and prints {NAME: what was told} as JSON: notices, and the error if there was one.
"""

import asyncio
import json
import sys
from pathlib import Path

from coterie.calibration.collect import CollectOptions, run_collect
from coterie.calibration.sources.checkpoint import CheckpointSource
from coterie.calibration.sources.loading import CheckpointOptions
from coterie.errors import CoterieError


class Told(list):
    """A reporter that keeps the notices."""

    def begin(self, total, done):
        pass

    def advance(self):
        pass

    def notice(self, text):
        self.append(text)


def collect(prompts, max_tokens, out, folder):
    told = Told()
    options = CollectOptions(Path(prompts), Path(out) / f"{Path(folder).name}.trace", max_tokens=int(max_tokens))
    try:
        asyncio.run(run_collect(CheckpointSource(CheckpointOptions(folder), notice=told.notice), options, told))
    except CoterieError as error:
        told.append(f"{type(error).__name__}: {error}")
    return told


prompts, max_tokens, out, *folders = sys.argv[1:]
print(json.dumps({Path(folder).name: collect(prompts, max_tokens, out, folder) for folder in folders}))
