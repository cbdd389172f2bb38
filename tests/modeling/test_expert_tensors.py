"""Experts read one by one: the right numbers, and no byte of others."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from coterie.errors import InputError, UnsupportedError
from coterie.modeling.expert_tensors import ExpertFiles, from_mxfp4, pack_experts, read_expert_model
from coterie.modeling.prepare import open_weights
from coterie.modeling.tensors import TensorFile
from tiny_checkpoints import ARCHITECTURES, config_of, random_tensors, write_checkpoint
from tiny_experts import gpt_oss_tensors, write_gpt_oss


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_experts_are_packed_as_in_the_engine_s_file(architecture, packed):
    files, tensors = ExpertFiles.open(packed[architecture].parent.parent), open_weights(packed[architecture]).tensors
    layer = files.model.geometry.layers - 1
    weights = pack_experts(files.model, 3, (files.expert(layer, expert) for expert in (5, 0, 7)))
    hidden_layer = files.model.moe_layers[layer]
    np.testing.assert_array_equal(weights.gate_up, tensors.floats(f"{hidden_layer}.experts.gate_up")[[5, 0, 7]])
    np.testing.assert_array_equal(weights.down, tensors.floats(f"{hidden_layer}.experts.down")[[5, 0, 7]])


@pytest.mark.parametrize("mxfp4", [False, True])
def test_gpt_oss_s_gates_and_ups_take_turns(mxfp4, tmp_path):
    tensors = gpt_oss_tensors()
    write_gpt_oss(tmp_path, mxfp4=mxfp4)
    expert = ExpertFiles.open(tmp_path).expert(1, 3)
    source = "model.layers.1.mlp.experts"
    both, bias = tensors[f"{source}.gate_up_proj"][3], tensors[f"{source}.gate_up_proj_bias"][3]  # [D, 2I], [2I]
    np.testing.assert_array_equal(expert.gate, both[:, 0::2].T)
    np.testing.assert_array_equal(expert.up, both[:, 1::2].T)
    np.testing.assert_array_equal(expert.down, tensors[f"{source}.down_proj"][3].T)
    for got, wanted in zip(
        expert.biases, (bias[0::2], bias[1::2], tensors[f"{source}.down_proj_bias"][3]), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def test_four_bits_are_a_sign_two_of_exponent_and_one_of_mantissa_times_a_power_of_two():
    # 0x21: lower half 1 is 0.5, upper half 2 is 1; 0xF7: 7 is 6, 15 is -6; scales 127 + 1 and 127 - 1
    codes = np.array([[[0x21, 0xF7], [0x21, 0xF7]]], np.uint8)
    values = from_mxfp4(codes, np.array([[128, 126]], np.uint8))
    np.testing.assert_array_equal(values, [[1, 2, 12, -12, 0.25, 0.5, 3, -3]])


def recorded(monkeypatch):
    """Byte ranges that are read from tensor files."""
    ranges, raw = [], TensorFile.raw

    def record(file, name, place=None):
        ranges.append((name, place))
        return raw(file, name, place)

    monkeypatch.setattr(TensorFile, "raw", record)
    return ranges


def test_only_an_expert_s_own_tensors_are_read(tmp_path, monkeypatch):
    files, read = ExpertFiles.open(write_checkpoint(tmp_path, "mixtral")), recorded(monkeypatch)
    files.expert(1, 6)
    names = [f"model.layers.1.block_sparse_moe.experts.6.{name}.weight" for name in ("w1", "w3", "w2")]
    assert read == [(name, None) for name in names]


@pytest.mark.parametrize("mxfp4", [False, True])
def test_only_an_expert_s_own_place_in_a_stack_is_read(mxfp4, tmp_path, monkeypatch):
    write_gpt_oss(tmp_path, mxfp4=mxfp4)
    files, read = ExpertFiles.open(tmp_path), recorded(monkeypatch)
    files.expert(0, 2)
    assert len(read) == (6 if mxfp4 else 4)
    assert {place for _, place in read} == {2}


def test_a_place_of_a_tensor_is_its_bytes_alone(tmp_path):
    stack = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    save_file({"stack": stack}, tmp_path / "file")
    file = TensorFile.open(tmp_path / "file")
    assert file.raw("stack", 2).tobytes() == stack[2].tobytes()
    np.testing.assert_array_equal(file.floats("stack", 3), stack[3])


def test_settings_of_attention_do_not_matter_to_experts(tmp_path):
    write_checkpoint(tmp_path, "qwen3_moe", attention_bias=True)
    assert read_expert_model(tmp_path).size == 24


@pytest.mark.parametrize(
    ("architecture", "changes", "error", "message"),
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, UnsupportedError, "hidden_act is 'gelu'"),
        ("mixtral", {"quantization_config": {"quant_method": "fp8"}}, UnsupportedError, "quantization_config is set"),
        ("qwen3_moe", {"moe_intermediate_size": None}, InputError, "there is no moe_intermediate_size"),
        ("qwen3_moe", {"hidden_size": "64"}, InputError, "hidden_size"),
        ("qwen3_moe", {"model_type": "qwen2_moe"}, UnsupportedError, "experts of 'qwen2_moe', but of deepseek_v3"),
    ],
)
def test_what_is_not_computed_is_refused(architecture, changes, error, message, tmp_path):
    config = {name: value for name, value in (config_of(architecture) | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        read_expert_model(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("swiglu_limit", 0.0, "swiglu_limit is 0.0"), ("intermediate_size", 40, "no multiple of 32")],
)
def test_sizes_that_gpt_oss_cannot_have_are_refused(field, value, message, tmp_path):
    write_gpt_oss(tmp_path, mxfp4=True, **{field: value})
    with pytest.raises(InputError, match=message):
        read_expert_model(tmp_path)


def test_a_missing_or_misshapen_expert_is_named(tmp_path):
    write_checkpoint(tmp_path, "olmoe")
    tensors = random_tensors(config_of("olmoe"))
    del tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    tensors["model.layers.0.mlp.experts.2.up_proj.weight"] = np.zeros((3, 3), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    files = ExpertFiles.open(tmp_path)
    with pytest.raises(InputError, match=r"no tensor model\.layers\.0\.mlp\.experts\.1\.up_proj\.weight"):
        files.expert(0, 1)
    with pytest.raises(InputError, match=r"experts\.2\.up_proj\.weight is of shape \(3, 3\)"):
        files.expert(0, 2)


def test_four_bit_experts_of_another_dtype_are_refused(tmp_path):
    write_gpt_oss(tmp_path, mxfp4=False)
    write_gpt_oss(tmp_path / "other", mxfp4=True)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = gpt_oss_tensors()
    blocks = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    save_file(tensors | {blocks: np.zeros((4, 64, 2, 16), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="is of dtype 'F32'; it should be U8"):
        ExpertFiles.open(tmp_path).expert(0, 0)
