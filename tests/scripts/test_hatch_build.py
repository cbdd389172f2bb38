"""The build hook, under a compiler of our own making."""

from __future__ import annotations

import importlib.util
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

import pytest

COMPILER = """#!/bin/sh
for last; do :; done
case "$*" in *{failing}*) echo "no such instructions" >&2; exit 1;; esac
echo "$@" > "$last"
"""


@pytest.fixture
def hook(monkeypatch):
    """The module; hatchling is in the environment that pip builds in, not in this one."""

    class Interface(Generic[TypeVar("Config")]):
        pass

    parts = ["hatchling", "builders", "hooks", "plugin", "interface"]
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
    sys.modules[".".join(parts)].BuildHookInterface = Interface
    spec = importlib.util.spec_from_file_location("hatch_build", Path(__file__).parents[2] / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compile_with(hook, monkeypatch, tmp_path):
    """Compile with a compiler that fails where its arguments hold a word: built names, warnings."""

    def build(failing):
        compiler = tmp_path / "cc"
        compiler.write_text(COMPILER.format(failing=failing))
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CC", str(compiler))
        warnings = []
        return [file.name for file in hook.build_all(tmp_path, warnings.append)], warnings

    return build


def test_each_level_is_compiled_and_none_may_fuse_as_it_likes(hook, compile_with, tmp_path):
    built, warnings = compile_with("nothing")
    assert built == [f"kernel-{level}.so" for level in hook.LEVELS]
    assert not warnings
    assert all("-ffp-contract=off" in (tmp_path / name).read_text() for name in built)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["cc", *built])


def test_a_level_that_does_not_compile_is_left_out_and_its_old_file_removed(hook, compile_with, tmp_path, monkeypatch):
    monkeypatch.setattr(hook, "LEVELS", {"portable": (), "x86-64-v4": ("-march=x86-64-v4",)})
    (tmp_path / "kernel-x86-64-v4.so").write_text("old")
    built, warnings = compile_with("march=x86-64-v4")
    assert built == ["kernel-portable.so"]
    assert not (tmp_path / "kernel-x86-64-v4.so").exists()
    assert "no such instructions" in warnings[0]


@pytest.mark.parametrize(("name", "value"), [("COTERIE_NATIVE", "0"), ("CC", "/nowhere/cc")])
def test_without_a_compiler_nothing_is_built_and_nothing_old_is_kept(hook, tmp_path, monkeypatch, name, value):
    (tmp_path / "kernel-portable.so").write_text("old")
    monkeypatch.setenv(name, value)
    warnings = []
    assert hook.build_all(tmp_path, warnings.append) == []
    assert not list(tmp_path.iterdir())
    assert "will run on numpy" in warnings[0]
