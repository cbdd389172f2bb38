"""Packed weights: built once, whole, from the right checkpoint, or refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coterie.errors import InputError
from coterie.modeling import Model, prepare
from coterie.modeling.prepare import open_weights
from tiny_checkpoints import config_of, random_tensors, write_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "checkpoint", "qwen3_moe")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "packed"


def inode(path):
    """A file that was built anew has another one."""
    return path.stat().st_ino


def write_bfloat16(path, tensors):
    """A safetensors file of the upper halves of float32 values."""
    header, content = {}, b""
    for name, values in tensors.items():
        half = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(values.shape),
            "data_offsets": [len(content), len(content) + len(half)],
        }
        content += half
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


# --- what the file holds ------------------------------------------------------------------------------------


def test_arrays_are_the_checkpoint_s_in_the_order_of_the_products(checkpoint, folder):
    packed = load_file(prepare(checkpoint, folder))
    tensors = load_file(checkpoint / "model.safetensors")
    np.testing.assert_array_equal(packed["embedding"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(packed["head"][0, :, :50], tensors["lm_head.weight"].T)
    assert not packed["head"][0, :, 50:].any()
    source = "model.layers.1.mlp.experts.3"
    gate_up, down = packed["1.experts.gate_up"][3, 0], packed["1.experts.down"][3, 0]
    np.testing.assert_array_equal(gate_up[:, :24], tensors[f"{source}.gate_proj.weight"].T)
    np.testing.assert_array_equal(gate_up[:, 64:88], tensors[f"{source}.up_proj.weight"].T)
    np.testing.assert_array_equal(down[:24], tensors[f"{source}.down_proj.weight"].T)
    assert not gate_up[:, 24:64].any()
    assert not down[24:].any()


def test_padding_is_written_out(checkpoint, folder):
    plain, padded = prepare(checkpoint, folder), prepare(checkpoint, folder, pad_intermediate=256)
    assert load_file(padded)["0.experts.gate_up"].shape == (8, 4, 64, 128)
    added = 2 * 8 * 3 * 64 * 192 * 4  # layers, experts, matrices, hidden, columns, bytes
    assert padded.stat().st_size - plain.stat().st_size == pytest.approx(added, abs=1000)
    assert padded.stat().st_blocks * 512 >= padded.stat().st_size  # no holes


def test_a_tied_head_is_the_embedding(tmp_path, folder):
    checkpoint = write_checkpoint(tmp_path / "tied", "mixtral", tie_word_embeddings=True)
    packed = load_file(prepare(checkpoint, folder))
    np.testing.assert_array_equal(packed["head"][0, :, :50], packed["embedding"].T)


def test_several_files_with_an_index_give_the_arrays_of_one(checkpoint, tmp_path, folder):
    whole = load_file(prepare(checkpoint, folder))
    tensors = load_file(checkpoint / "model.safetensors")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    shutil.copy(checkpoint / "config.json", sharded)
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, sharded / file)
    index = {"weight_map": {name: file for file, some in files.items() for name in some}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    parts = load_file(prepare(sharded, tmp_path / "packed-shards"))
    for name, values in whole.items():
        np.testing.assert_array_equal(parts[name], values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_widened_exactly(dtype, tmp_path, folder):
    tensors = random_tensors(config_of("qwen3_moe"))
    checkpoint = write_checkpoint(tmp_path / "half", "qwen3_moe")
    name = "model.embed_tokens.weight"
    if dtype == "float16":
        save_file({n: v.astype(np.float16) for n, v in tensors.items()}, checkpoint / "model.safetensors")
        expected = tensors[name].astype(np.float16).astype(np.float32)
    else:
        write_bfloat16(checkpoint / "model.safetensors", tensors)
        expected = (tensors[name].view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(load_file(prepare(checkpoint, folder))["embedding"], expected)


def test_layers_beyond_the_last_are_left_alone(checkpoint, folder):
    add(checkpoint, "model.layers.2.mtp.weight", np.zeros(3, np.float32))
    prepare(checkpoint, folder)


# --- once ---------------------------------------------------------------------------------------------------


def test_a_good_file_is_kept(checkpoint, folder):
    first = inode(prepare(checkpoint, folder))
    assert inode(prepare(checkpoint, folder)) == first


def test_a_changed_checkpoint_is_converted_anew(checkpoint, folder):
    first = inode(prepare(checkpoint, folder))
    save_file(random_tensors(config_of("qwen3_moe"), seed=1), checkpoint / "model.safetensors")
    path = prepare(checkpoint, folder)
    assert inode(path) != first
    expected = load_file(checkpoint / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(load_file(path)["norm"], expected)


@pytest.mark.parametrize("damage", ["byte", "truncated", "empty", "version", "alien"])
def test_a_damaged_file_is_built_anew(damage, checkpoint, folder):
    path = prepare(checkpoint, folder)
    good = path.read_bytes()
    spoiled = {
        "byte": good[:-5] + bytes([good[-5] ^ 1]) + good[-4:],
        "truncated": good[:-4],
        "empty": b"",
        "version": good.replace(b'\\"version\\":1', b'\\"version\\":9'),
        "alien": b"\x10\0\0\0\0\0\0\0{}              ",
    }[damage]
    assert spoiled != good
    path.write_bytes(spoiled)
    assert prepare(checkpoint, folder).read_bytes() == good


def test_processes_that_ask_at_once_share_one_file(checkpoint, folder):
    found = []
    threads = [threading.Thread(target=lambda: found.append(inode(prepare(checkpoint, folder)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1


def watched(checkpoint, folder):
    """Inode of the file, and whether it was read or written to the end."""
    seen = []
    path = prepare(checkpoint, folder, progress=lambda done, total: seen.append(done == total))
    return inode(path), any(seen)


def test_a_checked_file_is_read_again_only_when_it_changed(checkpoint, folder):
    path = prepare(checkpoint, folder)
    first = inode(path)
    assert watched(checkpoint, folder) == (first, False)
    path.touch()
    assert watched(checkpoint, folder) == (first, True)
    assert watched(checkpoint, folder) == (first, False)
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert watched(checkpoint, folder) != (first, False)
    assert (
        load_file(path)["norm"].tobytes() == load_file(prepare(checkpoint, folder.with_name("other")))["norm"].tobytes()
    )


@pytest.mark.parametrize("note", [None, b"", b"\xff", b"1 2 3"])
def test_a_lost_or_damaged_note_costs_a_check(note, checkpoint, folder):
    path = prepare(checkpoint, folder)
    noted = path.with_suffix(".checked")
    noted.unlink() if note is None else noted.write_bytes(note)
    assert watched(checkpoint, folder) == (inode(path), True)
    assert watched(checkpoint, folder) == (inode(path), False)


def test_what_a_killed_process_began_is_removed_by_the_next_that_writes(checkpoint, folder):
    folder.mkdir()
    (folder / ".weights-64.safetensors.4711.tmp").write_bytes(b"begun")
    (folder / ".weights-128.safetensors.4711.tmp").write_bytes(b"another")
    prepare(checkpoint, folder)
    assert left(folder) == [".weights-128.safetensors.4711.tmp", "weights-64.checked", "weights-64.safetensors"]


def test_progress_ends_at_the_whole(checkpoint, folder):
    seen = []
    prepare(checkpoint, folder, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


# --- refused ------------------------------------------------------------------------------------------------


def add(checkpoint, name, values):
    file = checkpoint / "model.safetensors"
    save_file({**load_file(file), name: values}, file)


def left(folder):
    """What lies in the folder besides the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".weights.lock")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("model.norm.weight", None, "no tensor model.norm.weight"),
        ("model.norm.weight", np.zeros(3, np.float32), r"model.norm.weight is of shape \(3,\); .* makes it \(64,\)"),
        ("model.norm.weight", np.zeros(64, np.int32), "model.norm.weight is of dtype 'I32'"),
        ("model.layers.0.self_attn.q_proj.bias", np.zeros(64, np.float32), "1 tensors have no place .*q_proj.bias"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_left(name, values, message, checkpoint, folder):
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(name, None)
    save_file(tensors if values is None else {**tensors, name: values}, file)
    with pytest.raises(InputError, match=message):
        prepare(checkpoint, folder)
    assert left(folder) == []


@pytest.mark.parametrize("pad", [0, 16, 100, -64])
def test_padding_must_be_whole_blocks_and_hold_the_expert(pad, checkpoint, folder):
    with pytest.raises(InputError, match=f"pad_intermediate is {pad}; it must be a multiple of 64 .* own 24"):
        prepare(checkpoint, folder, pad_intermediate=pad)
    assert not folder.exists()


def test_a_disk_without_room_is_refused_before_writing(checkpoint, folder, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match="bytes are needed, 1000 are free"):
        prepare(checkpoint, folder)
    assert left(folder) == []


def test_a_disk_that_fills_up_leaves_nothing(checkpoint, folder, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        prepare(checkpoint, folder)
    assert left(folder) == []


def test_a_folder_that_cannot_be_made_is_named(checkpoint, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file/packed: weights cannot be written here"):
        prepare(checkpoint, tmp_path / "file" / "packed")


def test_a_checkpoint_without_weights_is_named(checkpoint, folder):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors: cannot be read: No such file"):
        prepare(checkpoint, folder)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", ""])
def test_an_index_may_not_name_files_elsewhere(shard, checkpoint, folder):
    index = {"weight_map": {"model.norm.weight": shard}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="not a file of its folder"):
        prepare(checkpoint, folder)


def test_an_index_that_is_none_is_refused(checkpoint, folder):
    (checkpoint / "model.safetensors.index.json").write_text("[")
    with pytest.raises(InputError, match="not an index"):
        prepare(checkpoint, folder)


def header_of(entries, content=b""):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"\0" * 20, "truncated, or not a safetensors file"),
        (b"\xff" * 20, "truncated, or not a safetensors file"),
        (b"\x04\0\0\0\0\0\0\0[[[[", "damaged header"),
        (header_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), "header announces 4"),
        (header_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "a has 4 bytes"),
        (header_of({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"), "cannot be"),
        (header_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"), "cannot be"),
        (header_of({"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, b"1234"), "damaged header"),
    ],
)
def test_files_that_are_no_safetensors_are_refused(content, message, checkpoint, folder):
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=message):
        prepare(checkpoint, folder)


def test_only_packed_files_are_opened_as_models(checkpoint, folder, tmp_path):
    with pytest.raises(InputError, match="not prepared by coterie"):
        Model.open(checkpoint / "model.safetensors")
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Model.open(tmp_path / "nothing")
    path = prepare(checkpoint, folder)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match="truncated or damaged"):
        open_weights(path)


def test_a_packed_file_must_hold_its_model_s_arrays(checkpoint, folder):
    path = prepare(checkpoint, folder)
    path.write_bytes(path.read_bytes().replace(b'"1.gate"', b'"9.gate"'))
    with pytest.raises(InputError, match="prepare the weights again"):
        open_weights(path)


@pytest.mark.parametrize(
    ("written", "message"), [(b'\\"version\\":9', "schema version 9, not 1"), (b'\\"version\\":x', "damaged header")]
)
def test_other_versions_and_damaged_headers_are_refused(written, message, checkpoint, folder):
    path = prepare(checkpoint, folder)
    path.write_bytes(path.read_bytes().replace(b'\\"version\\":1', written))
    with pytest.raises(InputError, match=message):
        open_weights(path)
