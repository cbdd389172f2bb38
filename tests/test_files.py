import os
from contextlib import suppress

import pytest

from coterie import files
from coterie.errors import ConfigError
from coterie.files import check_target, replacing


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    target = tmp_path / "out"
    target.write_text("before")
    with suppress(KeyboardInterrupt), replacing(target) as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "before"
    with replacing(target) as unfinished:
        unfinished.write_text("whole")
        assert target.read_text() == "before"
    assert target.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [target]


def special(tmp_path, kind):
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    return path


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_nothing_but_a_file_is_replaced(tmp_path, kind):
    path = special(tmp_path, kind)
    before = path.lstat().st_ino
    with pytest.raises(ConfigError, match=f"{kind} is no regular file"):
        check_target(path)
    with pytest.raises(ConfigError, match=f"{kind} is no regular file"), replacing(path):
        pytest.fail("must not get here")
    assert path.lstat().st_ino == before


def test_an_input_is_no_target_by_whatever_name(tmp_path):
    source, other = tmp_path / "source", tmp_path / "other"
    source.write_text("precious")
    (tmp_path / "link").symlink_to(source)
    os.link(source, tmp_path / "hard")
    for name in ("source", "link", "hard"):
        with pytest.raises(ConfigError, match=f"{name} is read by this command"):
            check_target(tmp_path / name, [other, source])
    check_target(other, [other, source])  # neither is there yet


def test_a_folder_must_be_there_and_writable(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="there is no folder"):
        check_target(tmp_path / "no" / "out")
    monkeypatch.setattr(files.os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match="may not be written to"):
        check_target(tmp_path / "out")
