"""Expert kernels against one another, and against GPT-OSS's experts in transformers."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def errors(engine_python):
    """Largest differences, as part of the largest value."""
    return json.loads(engine_python("expert_kernels.py").splitlines()[-1])


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("which", ["all", "some", "none"])
@pytest.mark.parametrize("kernel", ["vllm", "torch"])
def test_other_kernels_compute_what_the_embedded_engine_s_does(kernel, dtype, most, bounded, which, errors):
    assert errors[f"{kernel} {dtype} {bounded} {which}"] <= most


def test_gpt_oss_s_experts_are_those_of_transformers(errors):
    assert errors["transformers"] <= 1e-5


def test_four_bit_floats_are_those_of_transformers(errors):
    assert errors["mxfp4"] == 0


def test_torch_s_products_read_nothing_undefined_and_ask_a_gpu_for_no_value(engine_python):
    assert engine_python("check_torch_experts.py").splitlines()[-1] == "checked"
