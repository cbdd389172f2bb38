"""The workers of a machine share the pages of their weights: each costs its own KV cache, not another copy."""

from __future__ import annotations

import re

import numpy as np
import pytest
from workers import running

FIGURE = re.compile(r"^(Rss|Pss|Anonymous|Private_Dirty): +(\d+) kB$", re.MULTILINE)


def mapped(worker, file):
    """Kilobytes of a file in a worker's memory, by the kernel's names."""
    sums = dict.fromkeys(("Rss", "Pss", "Anonymous", "Private_Dirty"), 0)
    regions = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", (worker.proc / "smaps").read_text(), flags=re.MULTILINE)
    for region in regions:
        if region.partition("\n")[0].endswith(str(file)):
            for name, kilobytes in FIGURE.findall(region):
                sums[name] += int(kilobytes)
    return sums


@pytest.mark.parametrize("variant", [(), ("--pad-intermediate", "128")], ids=["plain", "memory-bound"])
def test_two_workers_hold_one_copy_of_the_weights(tmp_path, variant):
    rng = np.random.default_rng(0)
    with running(tmp_path, variant, variant) as workers:
        (file,) = tmp_path.glob("weights-*.safetensors")
        size = file.stat()
        assert size.st_blocks * 512 >= size.st_size  # written pages, no holes: zeros that are stored and read
        prompt = rng.integers(100, 3900, 200).tolist()  # long enough to use nearly every expert
        for worker in workers:
            worker.complete(prompt)
        found = [mapped(worker, file) for worker in workers]
    for figures in found:
        assert figures["Rss"] > 0.9 * size.st_size / 1024
        assert figures["Pss"] < 0.6 * figures["Rss"]  # half of it, but for pages that only one has used
        assert figures["Anonymous"] == figures["Private_Dirty"] == 0
    assert sum(figures["Pss"] for figures in found) <= 1.01 * size.st_size / 1024
