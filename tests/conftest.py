"""Set-up shared by all tests."""

from pathlib import Path

from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("coterie", deadline=None)  # no test depends on the speed of the machine
settings.load_profile("coterie")

TOGETHER = ("real_vllm", "faults")
"""Folders whose tests share processes, longest first: where tests run side by side, one process takes a folder."""

AFTER = {"faults/test_soak.py": "real_vllm"}
"""Files that go to the process of another folder, after its tests: the soak takes most of the machine."""

LONG = (*TOGETHER, "up", "scripts", "engines")
"""Folders to begin with, so that no process is left with a long one at the end."""


def pytest_collection_modifyitems(items):
    """Begin with what takes longest."""
    items.sort(key=lambda item: LONG.index(folder_of(item)) if folder_of(item) in LONG else len(LONG))


def folder_of(item) -> str:
    """The folder of `tests/` that a test is in; the file's name for those in none."""
    return item.path.relative_to(Path(__file__).parent).parts[0]


class ByFile(LoadScopeScheduling):
    """Keeps the tests of a file, which share its fixtures, in one process; see `pytest -n` in the Makefile.

    xdist's own marks of groups have no effect with pytest 9.2 (they are written to an attribute that it has no more).
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0].removeprefix("tests/")
        folder = file.partition("/")[0]
        return AFTER.get(file) or (folder if folder in TOGETHER else file)


def pytest_xdist_make_scheduler(config, log):
    """A scheduler of our own."""
    return ByFile(config, log)
