import json
import os
import stat

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from coterie.errors import InputError, TraceError
from coterie.tensorfile import TensorFormat, format_of


class Header(msgspec.Struct, forbid_unknown_fields=True):
    title: str


FORMAT = TensorFormat(
    name="film",
    version=2,
    header=Header,
    required=frozenset({"photos"}),
    optional=frozenset({"captions"}),
    most_bytes=32768,
    error=TraceError,
    remedy="take it again",
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "film.safetensors"


def envelope(**changes):
    return json.dumps({"format": "film", "version": 2, "header": {"title": "Rome"}} | changes)


def write_raw(path, metadata, arrays=None):
    save_file(arrays or {"photos": np.zeros(3, np.float32)}, path, metadata)


def test_what_is_written_is_read(path):
    FORMAT.write(path, Header("Rome"), {"photos": np.arange(6, dtype=np.uint16).reshape(2, 3).T})
    header, arrays = FORMAT.read(path)
    assert header.title == "Rome"
    assert arrays.keys() == {"photos"}
    assert arrays["photos"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_pipe_is_refused_rather_than_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(TraceError, match="not a regular file"):
        FORMAT.read(path)


def test_equal_contents_give_equal_bytes(tmp_path):
    arrays = {"photos": np.arange(3, dtype=np.int64), "captions": np.ones(2, np.uint8)}
    FORMAT.write(tmp_path / "a", Header("Rome"), arrays)
    FORMAT.write(tmp_path / "b", Header("Rome"), dict(reversed(arrays.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_written_file_has_the_usual_permissions_and_leaves_nothing_beside_it(path, tmp_path):
    FORMAT.write(path, Header("Rome"), {"photos": np.zeros(1, np.float32)})
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["film.safetensors", "plain"]


def test_a_write_that_fails_leaves_the_old_file_untouched(path, tmp_path):
    path.mkdir()  # a folder cannot be replaced by a file
    with pytest.raises(TraceError, match="cannot be written"):
        FORMAT.write(path, Header("Rome"), {"photos": np.zeros(1, np.float32)})
    assert [file.name for file in tmp_path.iterdir()] == ["film.safetensors"]


@pytest.mark.parametrize(("parent", "problem"), [("nowhere", "No such file"), ("a_file", "Not a directory")])
def test_a_folder_that_cannot_hold_the_file_is_named(tmp_path, parent, problem):
    (tmp_path / "a_file").touch()
    with pytest.raises(TraceError, match=f"{parent}/film: cannot be written: {problem}"):
        FORMAT.write(tmp_path / parent / "film", Header("Rome"), {"photos": np.zeros(1, np.float32)})


def test_an_interrupted_write_leaves_nothing_behind(path, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    path.write_text("old")
    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        FORMAT.write(path, Header("Rome"), {"photos": np.zeros(1, np.float32)})
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "old"


def test_a_missing_file_is_named_with_the_remedy(path):
    with pytest.raises(TraceError, match=r"film.safetensors: cannot be read: No such file.*; take it again"):
        FORMAT.read(path)


def test_every_truncation_is_refused(path, tmp_path):
    FORMAT.write(path, Header("Rome"), {"photos": np.zeros(4, np.float32)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        (tmp_path / "part").write_bytes(whole[:length])
        with pytest.raises(TraceError, match="truncated or not a safetensors file"):
            FORMAT.read(tmp_path / "part")


def test_a_file_larger_than_the_format_allows_is_not_opened(path):
    path.write_bytes(bytes(32769))
    with pytest.raises(TraceError, match="32769 bytes, more than the 32768"):
        FORMAT.read(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" * 20, b"\x93NUMPY" * 20, b"{\0\0\0\0\0\0\0" + b"{" * 9])
def test_files_of_other_kinds_are_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(TraceError, match="truncated or not a safetensors file"):
        FORMAT.read(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"prompt": "Once upon a time"}\n' * 9, "JSON, such as a prompt file, not a film; take it again"),
        (b'[{"prompt": "Once upon a time"}]', "JSON, such as a prompt file, not a film"),
        (
            b'{"model":"tiny","prompts":"0f","max_tokens":5,"records":"counts"}\n',
            "an unfinished collection.*, not a film",
        ),
    ],
)
def test_what_is_mistaken_for_an_array_file_is_named(path, content, problem):
    path.write_bytes(content)
    with pytest.raises(TraceError, match=f"film.safetensors: {problem}"):
        FORMAT.read(path)


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        (None, "not a film of coterie"),
        ({"format": "pt"}, "not a film of coterie"),
        ({"coterie": "{"}, "damaged header"),
        ({"coterie": "[" * 20000}, "damaged header"),
        ({"coterie": '{"format": "film"}'}, "damaged header"),
        ({"coterie": envelope(format="trace")}, "holds a trace, not a film"),
        ({"coterie": envelope(version=3)}, "schema version 3; this release reads 2"),
        ({"coterie": envelope(header={"title": 7})}, "damaged header"),
        ({"coterie": envelope(header={"title": "Rome", "year": 1})}, "damaged header"),
    ],
)
def test_alien_and_damaged_headers_are_refused(path, metadata, problem):
    write_raw(path, metadata)
    with pytest.raises(TraceError, match=problem):
        FORMAT.read(path)


def test_missing_and_unknown_arrays_are_named(path):
    write_raw(path, {"coterie": envelope()}, {"captions": np.zeros(1, np.uint8)})
    with pytest.raises(TraceError, match="lacks photos"):
        FORMAT.read(path)
    write_raw(path, {"coterie": envelope()}, {"photos": np.zeros(1, np.uint8), "films": np.zeros(1, np.uint8)})
    with pytest.raises(TraceError, match="unknown arrays: films"):
        FORMAT.read(path)


def test_a_dtype_that_no_format_uses_is_refused(path):
    write_raw(path, {"coterie": envelope()}, {"photos": np.zeros(1, np.float16)})
    with pytest.raises(InputError, match="photos is of dtype F16"):
        FORMAT.read(path)


def test_a_file_says_what_it_is_and_anything_else_says_nothing(path, tmp_path):
    FORMAT.write(path, Header("Rome"), {"photos": np.zeros(3, np.float32)})
    assert format_of(path) == "film"
    write_raw(path, {"coterie": "no JSON"})
    assert format_of(path) is None
    write_raw(path, {"other": "library"})
    assert format_of(path) is None
    path.write_bytes(b"no safetensors")
    assert [format_of(other) for other in (path, tmp_path, tmp_path / "missing")] == [None, None, None]
