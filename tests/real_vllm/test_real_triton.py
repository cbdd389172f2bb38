"""The Triton products of expert servers, in Triton's interpreter: no GPU, but the engine's torch and triton."""


def test_grouped_products_are_sums_by_hand_whatever_experts_are_chosen(engine_python):
    assert int(engine_python("check_triton_experts.py")) == 75
