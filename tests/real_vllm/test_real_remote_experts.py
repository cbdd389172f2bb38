"""Real vLLM and transformers whose experts are in servers give the tokens of stock ones, and hold no expert."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
from servers import TINY

from expert_processes import expert_server
from running_monitor import running_monitor
from tiny_checkpoints import write_checkpoint

SIZES = ("16", "48")  # prompts, tokens of each


def computed_by(server):
    return server.get("/load").json()["requests"]["computed"]


def tokens_with(engine_python, monitor, *options, sizes=SIZES):
    lines = engine_python("remote_experts.py", TINY, monitor, *sizes, *options).splitlines()
    return json.loads(next(line for line in lines if line.startswith("{")))


def differences(one, other):
    """Of two outputs: how many tokens differ, how many of their log-probabilities, and by how much at most."""
    tokens, logprobs = (np.array(one[name]) - np.array(other[name]) for name in ("tokens", "logprobs"))
    return int((tokens != 0).sum()), int((logprobs != 0).sum()), float(np.abs(logprobs).max())


def test_768_greedy_tokens_are_those_of_stock_vllm_though_one_of_two_expert_servers_is_killed(engine_python):
    """Each request alone.  Beside it, as a control: stock vLLM and itself, with all requests at once."""
    stock = tokens_with(engine_python, "stock", "together")
    with (
        running_monitor() as monitor,
        expert_server(TINY, "--monitor", monitor, "--name", "one") as one,
        expert_server(TINY, "--monitor", monitor, "--name", "two") as two,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(tokens_with, engine_python, monitor)
        while not running.done() and computed_by(two) < 1000:  # of 5 layers' 16 * 48, and some more
            time.sleep(0.1)
        two.process.kill()
        before = computed_by(one)
        remote = running.result()
        assert computed_by(one) > before + 1000
    assert remote["tokens"] == stock["tokens"]
    assert sum(map(len, stock["tokens"])) == sum(map(len, stock["together"]["tokens"])) == 768
    assert stock["steps"] >= 768 > 4 * stock["together"]["steps"]
    print("of 768: tokens, log-probabilities that differ, by how much at most")
    print("with expert servers, requests alone:", *differences(stock, remote))
    print("stock vLLM itself, requests together:", *differences(stock, stock["together"]))
    assert (stock["expert_weights"], remote["expert_weights"]) == (5 * 64 * 3 * 128 * 64, 0)
    assert remote["other_weights"] == stock["other_weights"]


def test_two_tensor_parallel_ranks_give_the_tokens_of_one_stock_engine(engine_python):
    few = ("2", "24")
    stock = tokens_with(engine_python, "stock", sizes=few)
    with running_monitor() as monitor, expert_server(TINY, "--monitor", monitor):
        ranks = tokens_with(engine_python, monitor, "two_ranks", sizes=few)
    assert ranks["tokens"] == stock["tokens"]
    assert ranks["expert_weights"] == 0


def test_transformers_with_experts_in_servers_gives_the_tokens_of_its_own(engine_python, tmp_path):
    pairs = []
    with ExitStack() as running:
        for architecture, changes in {"mixtral": {}, "deepseek_v3": {"num_key_value_heads": 4}}.items():
            checkpoint = write_checkpoint(tmp_path / architecture, architecture, **changes)
            monitor = running.enter_context(running_monitor())
            running.enter_context(expert_server(checkpoint, "--monitor", monitor, "--experts", "0-4"))
            running.enter_context(expert_server(checkpoint, "--monitor", monitor, "--experts", "4-7"))
            pairs += [checkpoint, monitor]
        results = json.loads(engine_python("hf_remote_experts.py", *pairs).splitlines()[-1])
    for result in results:
        assert result["same"]
        assert result["difference"] <= 1e-5
        assert not result["experts"]


def test_what_does_not_go_with_experts_in_servers_is_refused_by_name(engine_python):
    assert int(engine_python("check_remote_experts.py").splitlines()[-1]) == 14
