"""vLLM's side of bench/modeling.py, run with vLLM's Python: CHECKPOINT DTYPE COMPILED CONTEXT STEPS BUDGET.

Reads batch sizes from standard input and answers each with one line of JSON.  Scheduler, model and sampling run in this
process, on one thread, so its CPU time is the engine's.
"""

import json
import os
import sys
import time

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

import numpy as np
from vllm import LLM, SamplingParams

checkpoint, dtype, compiled, context, steps, budget = sys.argv[1:]
engine = LLM(
    checkpoint,
    dtype=dtype,
    enforce_eager=compiled == "0",
    max_model_len=1024,
    max_num_seqs=64,
    max_num_batched_tokens=int(budget),
    enable_prefix_caching=False,
    async_scheduling=False,
)
rng = np.random.default_rng(0)


def seconds(batch, tokens):
    prompts = [{"prompt_token_ids": rng.integers(1, 4096, int(context)).tolist()} for _ in range(batch)]
    wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    start = time.process_time()
    engine.generate(prompts, wanted, use_tqdm=False)
    return time.process_time() - start


for line in sys.stdin:
    batch = int(line)
    prefill = seconds(batch, 1)
    decode = (seconds(batch, 1 + int(steps)) - prefill) / int(steps)
    print(json.dumps({"decode_ms": decode * 1e3, "prefill_ms": prefill / batch * 1e3}), flush=True)
