"""Configurations: what is read, and what is refused by name."""

from __future__ import annotations

import json

import pytest

from coterie.core import ModelGeometry
from coterie.errors import InputError, UnsupportedError
from coterie.modeling.config import GroupedAttention, LatentAttention, read_forward_config
from coterie.modeling.gates import SigmoidRule, SoftmaxRule
from coterie.modeling.rope import Rope
from tiny_checkpoints import config_of

YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 1.0}


def read(tmp_path, architecture, **changes):
    (tmp_path / "config.json").write_text(json.dumps(config_of(architecture, **changes)))
    return read_forward_config(tmp_path)


def test_qwen3_moe_is_read(tmp_path):
    config = read(tmp_path, "qwen3_moe", mlp_only_layers=[0])
    assert config.attention == GroupedAttention(kv_heads=2, head_dim=16, norm="head", window=None)
    assert config.gate == SoftmaxRule(top_k=2, renormalise=True)
    assert config.geometry == ModelGeometry(1, 8, 2)
    assert (config.moe_layers, config.expert_size, config.dense_size, config.shared_size) == ((1,), 24, 40, 0)
    assert config.scale == 16**-0.5


def test_mixtral_always_renormalises_and_may_have_a_window(tmp_path):
    config = read(tmp_path, "mixtral", sliding_window=30)
    assert config.attention == GroupedAttention(kv_heads=2, head_dim=16, norm="none", window=30)
    assert config.gate == SoftmaxRule(top_k=2, renormalise=True)
    assert config.expert_size == 40


def test_olmoe_norms_all_heads_together(tmp_path):
    config = read(tmp_path, "olmoe")
    assert config.attention == GroupedAttention(kv_heads=4, head_dim=16, norm="full", window=None)
    assert config.gate == SoftmaxRule(top_k=2, renormalise=False)


def test_deepseek_v3_is_read(tmp_path):
    config = read(tmp_path, "deepseek_v3", n_shared_experts=2)
    assert config.attention == LatentAttention(16, 12, 8, 4, 6, interleaved=True)
    assert config.gate == SigmoidRule(2, 4, 2, renormalise=True, scaling=2.5)
    assert (config.moe_layers, config.shared_size) == ((1,), 48)
    assert config.scale == pytest.approx(12**-0.5)
    assert read(tmp_path, "deepseek_v3", q_lora_rank=None).attention.query_rank is None


def test_older_files_hold_theta_and_scaling_apart(tmp_path):
    old = {"rope_parameters": None, "rope_theta": 500.0}
    assert read(tmp_path, "olmoe", **old).rope == Rope(500.0, 16, None)
    config = read(tmp_path, "deepseek_v3", rope_scaling=YARN, **old)
    assert config.rope.yarn is not None
    # 0.1 ln 4 + 1 = 1.1386, for queries and for keys
    assert config.scale == pytest.approx(12**-0.5 * 1.13863**2, rel=1e-4)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("deepseek_v3", {"quantization_config": {"bits": 8}}, "quantization_config is 'set'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("olmoe", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "linear"),
        ("olmoe", {"model_type": "phimoe"}, "'phimoe' is not computed by coterie; deepseek_v3, mixtral"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, architecture, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        read(tmp_path, architecture, **changes)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("mixtral", {"vocab_size": None}, "missing required field `vocab_size`"),
        ("mixtral", {"vocab_size": 0}, "vocab_size"),
        ("mixtral", {"hidden_size": "64"}, "hidden_size"),
        ("qwen3_moe", {"norm_topk_prob": None}, "missing required field `norm_topk_prob`"),
        ("qwen3_moe", {"num_key_value_heads": 3}, "4 heads do not share 3 key heads"),
        ("qwen3_moe", {"head_dim": 7}, "7 rotary dimensions are no pairs"),
        ("deepseek_v3", {"n_group": 3}, "cannot be taken from 2 of 3 groups"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "top-5 of 8 experts cannot be taken from 2 of 4 groups"),
        ("deepseek_v3", {"n_group": 8}, "a group needs two experts"),
    ],
)
def test_wrong_values_are_named(tmp_path, architecture, changes, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, architecture, **changes)
