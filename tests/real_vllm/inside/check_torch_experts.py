"""What torch's grouped products read and ask for, and what their kernel refuses; prints `checked`."""

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from coterie.core import ModelGeometry
from coterie.errors import UnsupportedError
from coterie.experts.torch.grouped import routed
from coterie.experts.torch.kernel import TorchKernel
from coterie.experts.torch.target import DeviceExperts
from coterie.modeling.expert_tensors import Expert, ExpertModel

EXPERTS, HIDDEN, SIZE, TOKENS, TOP_K = 5, 16, 24, 9, 3


def model(hidden=HIDDEN):
    return ExpertModel("gpt_oss", ModelGeometry(1, EXPERTS, TOP_K), (0,), hidden, SIZE, (1.702, 7.0), False)


def refusal(act, *arguments):
    try:
        act(*arguments)
    except UnsupportedError as error:
        return str(error)
    return ""


def check_undefined_rows():
    """The rows of pairs of no expert, which grouped_mm leaves undefined, are in no sum: here they are NaN."""
    rng = np.random.default_rng(0)
    experts = [
        Expert(
            *(rng.standard_normal(shape, np.float32) for shape in ((SIZE, HIDDEN), (SIZE, HIDDEN), (HIDDEN, SIZE))),
            tuple(rng.standard_normal(length, np.float32) for length in (SIZE, SIZE, HIDDEN)),
        )
        for _ in range(EXPERTS)
    ]
    kernel = TorchKernel("cpu")
    weights = kernel.pack(model(), EXPERTS, experts)
    rows, router = rng.standard_normal((TOKENS, HIDDEN), np.float32), rng.random((TOKENS, TOP_K), np.float32)
    ids = rng.integers(-1, EXPERTS, (TOKENS, TOP_K))
    ids[0] = -1
    wanted = kernel.compute(weights, rows, ids, router)
    assert np.isfinite(wanted).all()
    assert not wanted[0].any()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1000).isnan().all()
    assert np.array_equal(kernel.compute(weights, rows, ids, router), wanted)


def check_no_value_is_asked_for():
    """Tensors without values, by the operators' rules for a GPU: who asks for a value gets an error."""
    with FakeTensorMode():
        layer = DeviceExperts(
            torch.empty(EXPERTS, 2 * SIZE, HIDDEN, dtype=torch.bfloat16),
            torch.empty(EXPERTS, HIDDEN, SIZE, dtype=torch.bfloat16),
            torch.empty(EXPERTS, 2 * SIZE),
            torch.empty(EXPERTS, HIDDEN),
            1.702,
            7.0,
        )
        ids = torch.empty(TOKENS, TOP_K, dtype=torch.int32)
        sums = routed(torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16), ids, torch.empty(TOKENS, TOP_K), layer)
        assert (sums.shape, sums.dtype) == ((TOKENS, HIDDEN), torch.float32)
        try:
            ids[0, 0].item()
        except DataDependentOutputException:
            return
    raise AssertionError("a value was given out")


def check_refusals():
    assert "hidden size 20 is no multiple of 8" in refusal(TorchKernel("cpu").check, model(20))
    assert "1024 experts of a layer; it takes at most 1023" in refusal(TorchKernel("cpu").pack, model(), 1024, ())
    assert "torch sees none" in refusal(TorchKernel("cuda").check, model())
    assert TorchKernel().name == "torch cpu float32"  # no GPU here
    assert TorchKernel("cuda").name == "torch cuda bfloat16"


check_no_value_is_asked_for()
check_refusals()
check_undefined_rows()
print("checked")
