"""The plugin in a real vLLM server whose cache is small: hits, eviction, preemption, chunks, aborts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from oracle import (
    ask_counts,
    ask_ids,
    assert_same_ids,
    assert_same_routing,
    complete,
    metric,
    prompts,
    transformers_counts,
    transformers_ids,
)
from prometheus_client.parser import text_string_to_metric_families
from servers import TINY

from coterie.activations import ActivationTrace
from coterie.up.server import vllm_server

BLOCK = 32
BLOCKS = 40
CHUNK = 128
COUNTS_ONLY = (
    '{"kv_connector": "CountsConnector", "kv_role": "kv_both", '
    '"kv_connector_module_path": "coterie.vllm_plugin.connector"}'
)
OUTPUT = 24


@pytest.fixture(scope="module")
def server(engine_env, tmp_path_factory):
    small_cache = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS))
    chunks = ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "16")
    log = tmp_path_factory.mktemp("counts") / "server.log"
    with vllm_server(engine_env, TINY, COUNTS_ONLY, log, *small_cache, *chunks) as (url, _):
        yield url


@pytest.fixture(scope="module")
def texts():
    """One prompt of each domain; the first is longer than one chunk and many blocks."""
    every = prompts()
    chosen = every[:: max(1, len(every) // 8)][:8]
    return ["All of it: " + "".join(chosen[:3]), *chosen]


@pytest.fixture(scope="module")
def cold(server, texts, engine_python, tmp_path_factory):
    """First answers, in an engine that has seen nothing, beside transformers: text -> (prompt counts, oracle, near)."""
    hits = metric(server, "vllm:prefix_cache_hits_total")
    answers = [ask_counts(server, text, max_tokens=OUTPUT) for text in texts]
    assert metric(server, "vllm:prefix_cache_hits_total") == hits, "a cold run hit the cache"
    ids = [prompt_ids for _, _, prompt_ids, _ in answers]
    ids += [prompt_ids + output_ids[:-1] for _, _, prompt_ids, output_ids in answers]
    counts, near = transformers_counts(engine_python, TINY, ids, tmp_path_factory.mktemp("oracle"))
    n = len(texts)
    return [
        (answer, (counts[i], near[i]), (counts[n + i] - counts[i], near[n + i])) for i, answer in enumerate(answers)
    ]


def flood(server) -> None:
    """Fill the cache with other prompts, so that everything before is evicted."""
    for number in range(2 * BLOCKS * BLOCK // 600):
        ids = [100 + (7 * number + i * i) % 3900 for i in range(600)]
        complete(server, ids)


def test_cold_prompts_count_as_transformers_routes_them(cold):
    for (prompt, _, ids, _), oracle, _ in cold:
        assert (prompt.tokens, prompt.covered) == (len(ids), len(ids))
        assert_same_routing(prompt.counts, *oracle)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """The URL of an embedded engine on the same checkpoint."""
    options = ("--served-model-name", "tiny", "--port", "0", "--weights-dir", tmp_path_factory.mktemp("weights"))
    command = [sys.executable, "-m", "coterie", "engine", TINY, *options]
    with subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield re.search(r"http://\S+(?=,)", process.stdout.readline())[0]
        finally:
            process.terminate()


def test_the_embedded_engine_gives_the_tokens_of_vllm_one_request_at_a_time(server, cold, texts, embedded):
    for text in texts:
        own, theirs = (complete(url, text, max_tokens=100)["choices"][0] for url in (embedded, server))
        assert own["prompt_token_ids"] == theirs["prompt_token_ids"]
        assert own["token_ids"] == theirs["token_ids"]
        assert own["text"] == theirs["text"]


def metric_shapes(url):
    """Kind and labels of each of vLLM's metrics that a server has."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", trust_env=False).text)
    return {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels})
        for family in families
        if family.name.startswith("vllm:")
    }


def test_the_embedded_engine_has_metrics_of_vllm_by_name_kind_and_labels(server, embedded):
    for url in (server, embedded):
        complete(url, "Once upon a time", max_tokens=4)
    own, theirs = metric_shapes(embedded), metric_shapes(server)
    assert len(own) > 10
    assert {name: theirs.get(name) for name in own} == own


def test_outputs_count_as_transformers_routes_them(cold):
    for (_, output, _, _), _, oracle in cold:
        assert (output.tokens, output.covered) == (OUTPUT - 1, OUTPUT - 1)
        assert_same_routing(output.counts, *oracle)


def test_a_prompt_longer_than_a_step_is_counted_over_its_chunks(cold):
    prompt = cold[0][0][0]
    assert prompt.tokens > 2 * CHUNK
    assert prompt.complete


def test_a_repeated_prompt_hits_the_cache_and_counts_the_same(server, texts, cold):
    for text, ((first, _, _, _), _, _) in zip(texts[1:], cold[1:], strict=True):
        ask_counts(server, text)  # now its blocks are surely cached
        hits = metric(server, "vllm:prefix_cache_hits_total")
        again, _, _, _ = ask_counts(server, text)
        if first.tokens > BLOCK:
            assert metric(server, "vllm:prefix_cache_hits_total") > hits
        np.testing.assert_array_equal(again.counts, first.counts)


def test_a_prompt_that_shares_half_its_blocks_counts_its_own_tokens(server, cold, engine_python, tmp_path):
    ids = cold[0][0][2]
    half = len(ids) // 2 // BLOCK * BLOCK
    mixed = ids[:half] + ids[: len(ids) - half][::-1]
    ask_counts(server, ids)
    hits = metric(server, "vllm:prefix_cache_hits_total")
    prompt, _, _, _ = ask_counts(server, mixed)
    assert metric(server, "vllm:prefix_cache_hits_total") == hits + half
    counts, near = transformers_counts(engine_python, TINY, [mixed], tmp_path)
    assert prompt.complete
    assert_same_routing(prompt.counts, counts[0], near[0])


def test_after_its_blocks_were_evicted_a_prompt_counts_the_same(server, texts, cold):
    ask_counts(server, texts[0])
    flood(server)
    hits = metric(server, "vllm:prefix_cache_hits_total")
    again, _, _, _ = ask_counts(server, texts[0])
    assert metric(server, "vllm:prefix_cache_hits_total") == hits, "nothing was evicted"
    np.testing.assert_array_equal(again.counts, cold[0][0][0].counts)


def test_preempted_requests_count_every_token_once(server, engine_python, tmp_path):
    # 10 prompts of 100 tokens and 130 outputs each need 2,300 tokens of KV; there are 39 x 32 = 1,248
    ids = [[200 + (31 * number + i) % 3000 for i in range(100)] for number in range(10)]
    preemptions = metric(server, "vllm:num_preemptions_total")
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda prompt: ask_counts(server, prompt, max_tokens=130), ids))
    assert metric(server, "vllm:num_preemptions_total") > preemptions
    whole = [prompt + output[:-1] for prompt, (_, _, _, output) in zip(ids, answers, strict=True)]
    counts, near = transformers_counts(engine_python, TINY, ids + whole, tmp_path)
    for i, (prompt, output, _, _) in enumerate(answers):
        assert prompt.complete
        assert output.complete
        assert_same_routing(prompt.counts, counts[i], near[i])
        assert_same_routing(output.counts, counts[10 + i] - counts[i], near[10 + i])


def check_ids(answers, engine_python, folder):
    whole = [prompt + output[:-1] for _, prompt, output in answers]
    oracle, near = transformers_ids(engine_python, TINY, whole, folder)
    for (ids, prompt, _), expected, close in zip(answers, oracle, near, strict=True):
        assert_same_ids(ids, expected[len(prompt) :], close[len(prompt) :])


def test_ids_of_output_tokens_are_those_that_transformers_routes(server, texts, engine_python, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda text: ask_ids(server, text, max_tokens=OUTPUT), texts))
    assert {len(ids) for ids, _, _ in answers} == {OUTPUT - 1}
    check_ids(answers, engine_python, tmp_path)
    assert len(ask_ids(server, texts[0])[0]) == 0, "the only output token was not forwarded"


def test_preempted_requests_return_the_ids_of_every_output_token(server, engine_python, tmp_path):
    ids = [[300 + (37 * number + i) % 3000 for i in range(100)] for number in range(10)]
    preemptions = metric(server, "vllm:num_preemptions_total")
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda prompt: ask_ids(server, prompt, max_tokens=130), ids))
    assert metric(server, "vllm:num_preemptions_total") > preemptions
    check_ids(answers, engine_python, tmp_path)


def test_collect_with_ids_records_the_same_ids(server, texts, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts[1:4]))
    options = ("--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "ids.trace", "--max-tokens", OUTPUT)
    command = [sys.executable, "-m", "coterie", "collect", "--server", server, "--ids", "--json", *options]
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["recorded"] == ["counts", "decode_ids"]
    trace = ActivationTrace.load(tmp_path / "ids.trace")  # which checks that ids count to the outputs
    assert trace.decode_ids.shape == (3 * (OUTPUT - 1), 5, 4)


def test_requests_that_finish_in_one_step_get_their_own_counts(server, texts, cold):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda text: ask_counts(server, text)[0], texts[1:]))
    for answer, ((first, _, _, _), oracle, _) in zip(answers, cold[1:], strict=True):
        assert answer.tokens == first.tokens
        assert_same_routing(answer.counts, *oracle)


def test_aborted_requests_keep_no_slot_and_leave_later_counts_right(server, texts, cold):
    body = {"model": "tiny", "max_tokens": 900, "ignore_eos": True, "kv_transfer_params": {"coterie": "counts"}}

    def abort(number: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server}/v1/completions",
                json={**body, "prompt": [50 + number, *range(300, 340)]},
                timeout=0.4,
                trust_env=False,
            )

    with ThreadPoolExecutor(8) as pool:  # more aborts than there are slots (2 x max_num_seqs)
        list(pool.map(abort, range(40)))
    again, _, _, _ = ask_counts(server, texts[2])
    np.testing.assert_array_equal(again.counts, cold[2][0][0].counts)
    assert metric(server, "coterie_plugin_dropped_total") == 0


def test_requests_that_ask_for_nothing_get_the_reply_of_stock_vllm(server, texts, cold):
    plain = complete(server, texts[1], max_tokens=OUTPUT)
    assert plain["kv_transfer_params"] is None
    assert plain["choices"][0]["token_ids"] == cold[1][0][3]
    for strange in ({"coterie": [1]}, {"coterie": "output"}, {"unknown": {}}):
        assert complete(server, texts[1], kv_transfer_params=strange)["kv_transfer_params"] is None


def test_the_engine_tells_the_memory_of_the_store_and_the_time_in_hooks(server, tmp_path_factory):
    log = next(tmp_path_factory.getbasetemp().glob("counts*/server.log")).read_text(errors="replace")
    # 41 rows (one for padding) x 5 layers x 64 experts x 1 byte
    assert "counting experts of 5 layers x 64 experts, top-4; store 0.01 MiB for 40 KV blocks" in log
    assert metric(server, "coterie_plugin_hook_cpu_seconds_total") > 0
    assert metric(server, "coterie_plugin_steps_total") > 0
