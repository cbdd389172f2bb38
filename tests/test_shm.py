"""Shared-memory files: reserved, private, and gone once nobody holds them."""

import os
import stat
import subprocess
import sys

import pytest

from coterie.errors import UnsupportedError
from coterie.shm import SharedFile


def test_a_file_is_of_its_size_private_and_gone_after_unlink(tmp_path):
    file = SharedFile.create("x-", 10_000, str(tmp_path))
    assert file.path == tmp_path / f"x-{file.token}"
    assert len(file.memory) == file.path.stat().st_size == 10_000
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    file.unlink()
    file.unlink()
    assert list(tmp_path.iterdir()) == []
    file.memory[:3] = b"yet"  # what is mapped stays


def test_files_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path):
    code = f"import os; from coterie.shm import SharedFile; SharedFile.create('x-', 1, {str(tmp_path)!r}); os._exit(1)"
    subprocess.run([sys.executable, "-c", code])
    alien = tmp_path / "y-1"
    alien.touch()
    (killed,) = tmp_path.glob("x-*")
    first = SharedFile.create("x-", 1, str(tmp_path))
    assert not killed.exists()
    second = SharedFile.create("x-", 1, str(tmp_path))
    assert {*tmp_path.iterdir()} == {alien, first.path, second.path}
    first.unlink()
    second.unlink()


def test_what_cannot_be_reserved_leaves_no_file_and_no_descriptor(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(UnsupportedError, match="cannot reserve"):
        SharedFile.create("x-", 1 << 62, str(tmp_path))
    with pytest.raises(UnsupportedError, match="cannot create shared memory"):
        SharedFile.create("x-", 1, str(tmp_path / "none"))
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) <= before  # earlier tests' may be closed meanwhile
