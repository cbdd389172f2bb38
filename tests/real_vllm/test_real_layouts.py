"""Other layouts of real vLLM: tensor parallel, several KV groups, a dense model, and the V2 runner's call sequence."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from oracle import ask_counts, assert_same_routing, complete, metric, prompts, transformers_counts
from servers import TINY

from coterie.engines.vllm_nixl import kv_transfer_config
from coterie.errors import EngineError
from coterie.up.server import vllm_server
from coterie.wire import PROMPT_KEY, decode_counts

PD = kv_transfer_config("prefill", kv_buffer_device="cpu")


def check_against_transformers(url, model, engine_python, folder, texts):
    answers = [ask_counts(url, text, max_tokens=9) for text in texts]
    again = [ask_counts(url, text)[0] for text in texts]
    ids = [answer[2] for answer in answers] + [answer[2] + answer[3][:-1] for answer in answers]
    counts, near = transformers_counts(engine_python, model, ids, folder)
    for i, (prompt, output, _, _) in enumerate(answers):
        assert prompt.complete
        assert_same_routing(prompt.counts, counts[i], near[i])
        assert_same_routing(output.counts, counts[len(texts) + i] - counts[i], near[len(texts) + i])
        np.testing.assert_array_equal(again[i].counts, prompt.counts)


def remove_shared_memory(group: int) -> None:
    """Remove what vLLM's ranks, in this process group, share in `/dev/shm` and leave there; what is mapped stays."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ended since it was listed, or is not ours
            if os.getpgid(int(maps.parent.name)) == group:
                words = maps.read_text().split()
                for file in {word for word in words if word.startswith("/dev/shm/vllm_dist_")}:
                    Path(file).unlink(missing_ok=True)


def test_tensor_parallel_ranks_count_each_token_once(engine_env, engine_python, tmp_path):
    with vllm_server(
        engine_env, TINY, PD, tmp_path / "server.log", "--tensor-parallel-size", "2",
        "--distributed-executor-backend", "mp", "--block-size", "32", "--num-gpu-blocks-override", "200",
    ) as (url, process):  # fmt: skip
        remove_shared_memory(process.pid)
        check_against_transformers(url, TINY, engine_python, tmp_path, prompts()[:6])
        assert metric(url, "coterie_plugin_dropped_total") == 0


def test_a_model_with_several_kv_groups_is_counted_by_its_full_attention_group(
    engine_env, engine_python, checkpoints, tmp_path
):
    model = checkpoints / "gpt_oss"  # sliding-window and full attention in turn
    with vllm_server(
        engine_env, model, PD, tmp_path / "server.log", "--no-disable-hybrid-kv-cache-manager",
        "--num-gpu-blocks-override", "100", "--block-size", "32",
    ) as (url, _):  # fmt: skip
        texts = [text for text in prompts() if len(text) > 400][:6]
        params = complete(url, texts[0], kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]
        assert len(params["remote_block_ids"]) == 2, "the model has only one KV group"
        assert decode_counts(params[PROMPT_KEY]).complete
        check_against_transformers(url, model, engine_python, tmp_path, texts)


def test_a_dense_model_is_refused_at_start_with_the_remedy(engine_env, tmp_path):
    dense = tmp_path / "dense"
    shutil.copytree(TINY, dense)
    config = json.loads((dense / "config.json").read_text())
    for key in [key for key in config if "expert" in key or "moe" in key]:
        del config[key]
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (dense / "config.json").write_text(json.dumps(config))
    path = tmp_path / "server.log"
    with (
        pytest.raises(EngineError, match="before it was ready"),
        vllm_server(engine_env, dense, PD, path, "--load-format", "dummy", "--num-gpu-blocks-override", "60"),
    ):
        pass
    log = path.read_text(errors="replace")
    assert "a dense model: there are no experts to count; remove CountsConnector" in log


def test_rows_on_a_torch_device_count_as_numpy_does(engine_python):
    assert "rows agree" in engine_python("check_rows.py")


def test_a_kernel_or_router_that_cannot_be_captured_is_refused(engine_python):
    assert "capture agrees" in engine_python("check_capture.py")


def test_the_v2_runners_call_sequence_counts_once_and_before_the_output_copy(engine_python):
    assert "v2 sequence agrees" in engine_python("drive_v2_runner.py")
