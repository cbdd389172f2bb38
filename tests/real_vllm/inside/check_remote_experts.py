"""What vLLM with experts in servers refuses; prints how many refusals were as they should be."""

from types import SimpleNamespace

from coterie.errors import CoterieError
from coterie.vllm_experts.layer import _check, _hidden_layer
from coterie.vllm_experts.loader import read_config


def parallel(**changes):
    return SimpleNamespace(**{"is_sequence_parallel": False, "pcp_size": 1, "enable_eplb": False, **changes})


def refusal(act, *arguments, **named):
    try:
        act(*arguments, **named)
    except CoterieError as error:
        return str(error)
    return ""


engine = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False))  # on a CPU nothing is captured
cases = [
    (refusal(_check, engine, parallel(), in_input=False), ""),
    (refusal(_check, engine, parallel(is_sequence_parallel=True), in_input=False), "sequence parallelism"),
    (refusal(_check, engine, parallel(pcp_size=2), in_input=False), "context parallelism in prefill"),
    (refusal(_check, engine, parallel(enable_eplb=True), in_input=False), "vLLM's own expert balancing"),
    (refusal(_check, engine, parallel(), in_input=True), "router weights"),
    (refusal(_hidden_layer, "model.mlp.experts"), "no number of a layer"),
    (refusal(read_config, {}), "need 'monitor'"),
    (refusal(read_config, {"monitor": "http://a:1", "other": 1}), "need 'monitor'"),
    (refusal(read_config, {"monitor": "http://a:1", "timeout_s": 0}), "must be positive"),
    (refusal(read_config, {"monitor": "http://a:1", "timeout_s": 5.0}), ""),
]
for found, wanted in cases:
    assert wanted in found, (found, wanted)
    assert wanted or not found, found
assert _hidden_layer("model.layers.12.mlp.experts") == 12
print(len(cases))
