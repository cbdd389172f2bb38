"""A layer's experts on a device: `kernel` by torch's grouped GEMM, and `target`, on which `experts.triton` stands."""
