"""Files that commands read, up to a bound, and write: refused early, and replaced at once or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from coterie.errors import ConfigError


def read_text(path: str | os.PathLike[str], most_bytes: int) -> str:
    """A text file's contents, in UTF-8.

    Raises:
        ConfigError: the file cannot be read, or is larger than `most_bytes`.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(most_bytes + 1)  # a device has no size, and no end
        if len(data) > most_bytes:
            raise ConfigError(f"{path}: larger than {most_bytes} bytes")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def check_target(path: Path, inputs: Sequence[Path] = ()) -> None:
    """See that a file can be written where it is wanted, and that nothing of what it is made from is lost.

    Args:
        path: the file to write; may exist.
        inputs: files that are read for it.

    Raises:
        ConfigError: there is no such folder or nobody may write there, `path` is a folder or a device, or an input.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: the folder {path.parent} may not be written to")
    _check_regular(path)
    if path.exists() and any(one.exists() and path.samefile(one) for one in inputs):
        raise ConfigError(f"{path} is read by this command, which would replace it; name another file")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file, or leave what is there untouched: readers never see a part of it.

    Yields:
        A path in the same folder, to be written; it takes the place of `path` when the context ends well.

    Raises:
        ConfigError: `path` is a folder, a device or another thing that no file takes the place of.
        OSError: the file cannot be written.
    """
    _check_regular(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        _flush(unfinished)
        unfinished.replace(path)
    finally:
        with suppress(OSError):  # it is there only if something went wrong
            unfinished.unlink()


def _check_regular(path: Path) -> None:
    """A rename would succeed on a pipe or a device such as `/dev/null`, and leave a plain file in its place."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no regular file and cannot be replaced; name another file")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
