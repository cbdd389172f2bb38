"""The embedded engine: one process, one thread of steps, no torch and no vLLM.

`Engine` is the whole of it: requests in, outputs of each step out.  `Scheduler` says what a step computes, `BlockPool`
where its keys and values lie, `sample` which tokens follow, `Tokenizer` what they say.
"""
