"""Set-up shared by all tests."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("coterie", deadline=None)  # no test depends on the speed of the machine
settings.load_profile("coterie")

TOGETHER = ("real_vllm", "faults")
"""Folders whose tests share processes, longest first: where tests run side by side, one process takes a folder."""

LONG = (*TOGETHER, "up", "scripts", "engines")
"""Folders to begin with, so that no process is left with a long one at the end."""


def pytest_collection_modifyitems(items):
    """Tests of a file, which share its fixtures, stay together; see `pytest -n` in the Makefile."""
    for item in items:
        folder = folder_of(item)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(folder if folder in TOGETHER else item.path.stem))
    items.sort(key=lambda item: LONG.index(folder_of(item)) if folder_of(item) in LONG else len(LONG))


def folder_of(item) -> str:
    """The folder of `tests/` that a test is in; the file's name for those in none."""
    return item.path.relative_to(Path(__file__).parent).parts[0]
