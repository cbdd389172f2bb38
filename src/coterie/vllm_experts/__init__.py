"""vLLM whose routed experts are in expert servers; no file of vLLM is patched, and no expert tensor is read.

    vllm serve MODEL --load-format coterie_experts --model-loader-extra-config '{"monitor": "http://HOST:PORT"}'

Attention, KV cache, gates and shared experts stay in vLLM.  Its layer of routed experts is a `PluggableLayer`: the
loader, which comes before the model, puts another class in its place.

- `loader`: reads the checkpoint's other tensors.
- `layer`: has no weights; sends tokens, lets vLLM compute shared experts, and takes the sums.
- `ops`: the two ends of a layer as operators, which torch.compile does not look into, and the process's connections.
"""

LOAD_FORMAT = "coterie_experts"


def register() -> None:
    """Make the load format known to vLLM; called in each of its processes, any number of times."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    if LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        from coterie.vllm_experts.loader import ExpertlessLoader

        register_model_loader(LOAD_FORMAT)(ExpertlessLoader)
