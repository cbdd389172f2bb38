"""MoE layers of architectures by their config.json; real configurations of transformers are in tests/real_vllm."""

import json
from pathlib import Path

import pytest

from coterie.core import ModelGeometry
from coterie.errors import InputError, UnsupportedError
from coterie.model_config import ARCHITECTURES, read_model_config

QWEN = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 6,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 3,
}
PLAIN = {"num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.fixture
def read(tmp_path):
    def write_and_read(config):
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return read_model_config(tmp_path)

    return write_and_read


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (QWEN, (0, 1, 2, 3, 4, 5)),
        ({**QWEN, "mlp_only_layers": [0, 5]}, (1, 2, 3, 4)),
        ({**QWEN, "decoder_sparse_step": 2}, (1, 3, 5)),
        ({**QWEN, "decoder_sparse_step": 3, "mlp_only_layers": [2]}, (5,)),
        ({**QWEN, "decoder_sparse_step": None, "mlp_only_layers": None}, (0, 1, 2, 3, 4, 5)),
        (DEEPSEEK, (3, 4, 5)),
        ({**DEEPSEEK, "moe_layer_freq": 2}, (4,)),
        ({**DEEPSEEK, "model_type": "glm4_moe", "first_k_dense_replace": 1}, (1, 2, 3, 4, 5)),
        ({**DEEPSEEK, "model_type": "deepseek_v32"}, (3, 4, 5)),
        ({**DEEPSEEK, "model_type": "deepseek_v32", "mlp_layer_types": ["dense", *["sparse"] * 5]}, (1, 2, 3, 4, 5)),
        ({**PLAIN, "model_type": "mixtral"}, (0, 1, 2, 3)),
        ({**PLAIN, "model_type": "gpt_oss"}, (0, 1, 2, 3)),
        ({**PLAIN, "model_type": "lfm2_moe", "num_dense_layers": 2}, (2, 3)),
        ({**PLAIN, "model_type": "llama4_text", "interleave_moe_layer_step": 2}, (1, 3)),
        ({**PLAIN, "model_type": "llama4_text", "moe_layers": [3, 0]}, (0, 3)),
        ({**PLAIN, "model_type": "jamba", "expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3)),
        ({**PLAIN, "model_type": "ernie4_5_moe", "moe_layer_start_index": 1, "moe_layer_end_index": -1}, (1, 2, 3)),
        ({**PLAIN, "model_type": "ernie4_5_moe", "moe_layer_start_index": 0, "moe_layer_end_index": 2}, (0, 1, 2)),
    ],
)
def test_each_architecture_places_its_moe_layers_by_its_own_fields(read, config, layers):
    found = read(config)
    assert found.moe_layers == layers
    assert found.hidden_layers == config["num_hidden_layers"]
    assert found.architecture == config["model_type"]
    assert found.geometry.layers == len(layers)


def test_experts_and_top_k_have_other_names_in_other_architectures(read):
    gemma = {"model_type": "gemma4_text", "num_hidden_layers": 2, "enable_moe_block": True}
    found = read({**gemma, "num_experts": 128, "top_k_experts": 8})
    assert found.geometry == ModelGeometry(layers=2, experts=128, top_k=8)
    ernie = {"model_type": "ernie4_5_moe", "num_hidden_layers": 2, "moe_layer_start_index": 0}
    assert read({**ernie, "moe_num_experts": 64, "moe_k": 6}).geometry == ModelGeometry(2, 64, 6)


def test_the_language_model_of_a_larger_one_is_read(read):
    assert read({"model_type": "qwen3_vl_moe", "text_config": QWEN}).geometry == ModelGeometry(6, 16, 4)


def test_the_file_itself_may_be_named(tmp_path):
    (tmp_path / "other.json").write_text(json.dumps(QWEN))
    assert read_model_config(tmp_path / "other.json").hidden_layers == 6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN, "model_type": "mystery", "moe_every": 2}, "'mystery'.*moe_every, num_experts.*known are .*qwen3_moe"),
        ({"num_hidden_layers": 2}, "model_type 'None'"),
        ({**QWEN, "model_type": ["a"]}, "not known"),
        ({**DEEPSEEK, "first_k_dense_replace": 6}, "no MoE layer among its 6"),
        ({**PLAIN, "model_type": "gemma4_text", "enable_moe_block": False}, "no MoE layer"),
    ],
)
def test_an_unknown_or_dense_model_is_unsupported_by_name(read, config, message):
    with pytest.raises(UnsupportedError, match=message):
        read(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ({**QWEN, "num_experts": None}, "no n_routed_experts or num_local_experts or num_experts"),
        ({**QWEN, "num_experts": "16"}, "num_experts is '16'"),
        ({**QWEN, "num_experts": True}, "num_experts is 'True'"),
        ({**QWEN, "num_experts_per_tok": 0}, "is 0, not at least 1"),
        ({**QWEN, "num_experts_per_tok": 17}, "top_k must be a whole number from 1 to 16"),
        ({**QWEN, "num_hidden_layers": 5000}, "more than 4096"),
        ({**QWEN, "decoder_sparse_step": 0}, "not at least 1"),
        ({**QWEN, "mlp_only_layers": "all"}, "mlp_only_layers is not a list"),
        ({k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"}, "no first_k_dense_replace"),
        ({**DEEPSEEK, "model_type": "deepseek_v32", "mlp_layer_types": ["dense"]}, "mlp_layer_types is not"),
    ],
)
def test_a_damaged_configuration_names_file_and_field(read, config, message):
    with pytest.raises(InputError, match=message):
        read(config)


def test_the_documentation_names_every_architecture():
    page = (Path(__file__).parents[1] / "docs" / "collect.md").read_text(encoding="utf-8")
    assert [name for name in ARCHITECTURES if f"`{name.removesuffix('_text')}`" not in page] == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"config\.json: cannot be read: No such file"):
        read_model_config(tmp_path)
