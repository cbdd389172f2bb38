"""`collect` from checkpoints of each architecture with transformers, beside the published rules in plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from oracle import ROOT, assert_same_routing

from coterie.activations import ActivationTrace
from coterie.calibration.prompts import read_prompts
from coterie.core import ModelGeometry

OUTPUT = 12
TIE = "1e-4"  # stricter than between engines: both sides are transformers in float32
GEOMETRIES = {
    "mixtral": ModelGeometry(4, 8, 2),
    "qwen3_moe": ModelGeometry(3, 16, 4),  # layer 1 is dense
    "olmoe": ModelGeometry(4, 16, 4),
    "deepseek_v3": ModelGeometry(3, 16, 4),  # layer 0 is dense
    "gpt_oss": ModelGeometry(4, 16, 2),
    "gemma4": ModelGeometry(4, 16, 4),
    # found by their modules alone
    "qwen2_moe": ModelGeometry(4, 16, 4),
    "glm4_moe": ModelGeometry(3, 16, 4),
    "granitemoe": ModelGeometry(4, 16, 4),
    "phimoe": ModelGeometry(4, 16, 2),
}
SCORED_BY_SIGMOID = (
    "afmoe", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "lfm2_moe", "minimax_m2",
)  # fmt: skip
UNTOLD = ("phimoe",)  # its weights are in proportion to no score of all experts
REFUSED = ("llama", "llama4_text", "lacking")

by_architecture = pytest.mark.parametrize("name", GEOMETRIES)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Four plain prompts and two chats of the example file."""
    lines = (ROOT / "examples" / "prompts" / "serve.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [line for line in lines if "messages" in json.loads(line)]
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("\n".join([line for line in lines if line not in chats][:4] + chats[:2]))
    return file


@pytest.fixture(scope="module")
def told(checkpoints, prompts, engine_python, tmp_path_factory) -> tuple[Path, dict[str, list[str]]]:
    """Folder of the traces, and what was told of each checkpoint."""
    out = tmp_path_factory.mktemp("traces")
    folders = [checkpoints / name for name in (*GEOMETRIES, *REFUSED, "packed")]
    return out, json.loads(engine_python("collect_checkpoints.py", prompts, str(OUTPUT), out, *folders))


@pytest.fixture(scope="module")
def oracles(checkpoints, prompts, engine_python, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("oracles")
    engine_python("checkpoint_oracle.py", TIE, prompts, str(OUTPUT), out, *[checkpoints / name for name in GEOMETRIES])
    return out


@pytest.fixture
def trace(told, name) -> ActivationTrace:
    return ActivationTrace.load(told[0] / f"{name}.trace")


@pytest.fixture
def oracle(oracles, name) -> dict[str, np.ndarray]:
    with np.load(oracles / f"{name}.npz") as file:
        return dict(file)


@by_architecture
def test_a_trace_has_the_geometry_and_the_prompts_of_its_checkpoint(name, trace, prompts, oracle):
    assert (trace.model, trace.geometry) == (name, GEOMETRIES[name])
    assert trace.prompt_hashes == tuple(prompt.hash for prompt in read_prompts(prompts).prompts)
    np.testing.assert_array_equal(trace.prefill_tokens, oracle["lengths"])
    assert trace.complete.all()
    assert set(trace.decode_tokens) == {OUTPUT}
    assert set(trace.decode_covered) == {OUTPUT - 1}


@by_architecture
def test_prompts_choose_the_experts_of_the_published_rule(trace, oracle):
    assert_same_routing(trace.prefill, oracle["prompt"], oracle["prompt_near"])


@by_architecture
def test_outputs_with_a_cache_choose_as_one_pass_over_the_whole_text(trace, oracle):
    assert_same_routing(trace.decode, oracle["output"], oracle["output_near"])
    ids = np.sort(trace.decode_ids.reshape(oracle["ids"].shape), axis=-1)
    same = (ids == oracle["ids"]).all(axis=(1, 3))  # of each request and layer
    assert (same | oracle["output_near"].any(-1)).all()


@by_architecture
def test_gate_sums_are_those_of_the_published_scores(name, trace, oracle):
    np.testing.assert_allclose(trace.gate_logit, oracle["logit"], rtol=1e-5, atol=1e-4)
    if name in UNTOLD:
        assert trace.gate_prob is None
        return
    np.testing.assert_allclose(trace.gate_prob, oracle["prob"], rtol=1e-5, atol=1e-4)
    sums_to_tokens = np.allclose(trace.gate_prob.sum(-1), trace.prefill_tokens[:, None], rtol=1e-4)
    assert sums_to_tokens == (name not in SCORED_BY_SIGMOID)


def test_what_cannot_be_recorded_is_told(told):
    told = told[1]
    assert "4 layers x 16 experts, top-2, float32 on cpu" in told["phimoe"][1]
    assert "gate probabilities are not recorded" in told["phimoe"][2]
    assert told["llama"][-1] == "UnsupportedError: llama is a dense model: there are no experts to count"
    assert "architecture llama4_text: " in told["llama4_text"][-1]
    assert "model.layers.0.feed_forward.experts is not called with expert ids" in told["llama4_text"][-1]
    assert "lacking: 1 missing keys, first model.layers.2.mlp.router.weight" in told["lacking"][-1]


def test_packed_experts_are_unpacked(told):
    trace = ActivationTrace.load(told[0] / "packed.trace")
    assert trace.geometry == GEOMETRIES["gpt_oss"]
    assert trace.complete.all()


def test_a_prompt_beyond_the_context_is_named_by_its_place(checkpoints, engine_python, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "word " * 2000}))
    told = json.loads(engine_python("collect_checkpoints.py", file, str(OUTPUT), tmp_path, checkpoints / "mixtral"))
    assert f"EngineError: {file}:2: the prompt's" in told["mixtral"][-1]
    assert "tokens are more than the 1024 that the model's context holds" in told["mixtral"][-1]
    assert (tmp_path / "mixtral.trace.partial").exists()


def test_most_architectures_are_found_by_their_modules(engine_python, built):
    """Geometry as transformers builds it, the score that the architecture publishes, and the same with a cache."""
    folder, report = built
    found = json.loads(engine_python("survey_routers.py", folder).splitlines()[-1])
    refused = {name: found.pop(name) for name in ("llama4_text", "phimoe")}
    assert "experts is not called with expert ids" in refused["llama4_text"]
    assert "layers chose 2 of 16 experts, the config says 4 of 16" in refused["phimoe"]  # it is always top-2
    assert len(found) == len(report) - 2
    for name, survey in found.items():
        _, layers, experts, top_k = report[name]
        assert survey == [len(layers), experts, top_k, "sigmoid" if name in SCORED_BY_SIGMOID else "softmax", True]
