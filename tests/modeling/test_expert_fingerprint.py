"""What a checkpoint's experts are known by: the same wherever and however their files lie, another for others."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from safetensors.numpy import load_file, save_file

from coterie.errors import InputError
from coterie.modeling.expert_tensors import ExpertFiles
from coterie.modeling.tensors import TensorFile
from tiny_checkpoints import ARCHITECTURES, write_checkpoint
from tiny_experts import write_gpt_oss


def fingerprint(folder):
    return ExpertFiles.open(folder).fingerprint()


def rewrite(folder, change):
    """Change tensors in place."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: change(name, values) for name, values in tensors.items()}, file)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_copies_in_other_files_have_the_same_fingerprint(architecture, tmp_path):
    one, other = (write_checkpoint(tmp_path / name, architecture) for name in ("one", "other"))
    whole = other / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    file_of = {name: f"{place % 3}.safetensors" for place, name in enumerate(sorted(tensors))}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, other / file)
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    assert fingerprint(one) == fingerprint(other)


def test_what_is_not_the_experts_does_not_count(tmp_path):
    before = fingerprint(write_checkpoint(tmp_path, "qwen3_moe"))
    config = json.loads((tmp_path / "config.json").read_text())
    turned = dict(reversed({**config, "rope_theta": 7.0, "_name_or_path": "elsewhere"}.items()))
    (tmp_path / "config.json").write_text(json.dumps(turned, indent=2))
    rewrite(tmp_path, lambda name, values: values if ".experts." in name else values + 1)
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize("kind", ["gate_proj", "up_proj", "down_proj"])
def test_another_revision_of_the_experts_has_another_fingerprint(kind, tmp_path):
    before = fingerprint(write_checkpoint(tmp_path, "qwen3_moe", num_experts=64))
    rewrite(tmp_path, lambda name, values: values * 1.0001 if f".{kind}." in name else values)
    assert fingerprint(tmp_path) != before


def test_how_experts_are_stored_and_bounded_counts(tmp_path):
    folders = [write_gpt_oss(tmp_path / "four", mxfp4=True), write_gpt_oss(tmp_path / "full", mxfp4=False)]
    folders.append(write_gpt_oss(tmp_path / "bound", mxfp4=False, swiglu_limit=3.0))
    assert len({fingerprint(folder) for folder in folders}) == 3


def test_a_sample_of_tensors_is_looked_at_of_all_kinds_alike(tmp_path, monkeypatch):
    files = ExpertFiles.open(write_checkpoint(tmp_path, "qwen3_moe", num_experts=64))
    read, raw = [], TensorFile.raw
    monkeypatch.setattr(TensorFile, "raw", lambda file, name: (read.append(name), raw(file, name))[1])
    files.fingerprint()
    assert len(set(read)) == len(read) == 127
    assert min(Counter(name.split(".")[-2] for name in read).values()) > 35


def test_a_checkpoint_without_experts_is_refused(tmp_path):
    write_checkpoint(tmp_path, "qwen3_moe")
    others = {
        name: values for name, values in load_file(tmp_path / "model.safetensors").items() if "experts" not in name
    }
    save_file(others, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="no routed experts, by which clients and servers know each other"):
        fingerprint(tmp_path)
