"""The device of these tests: a GPU or, where there is none, the host, which tells that what they call has changed."""

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TIER = "triton" if ON_GPU else "cpu"  # of kvboost_fa2
COMPILER = "inductor" if ON_GPU else "aot_eager"  # of which the first takes half a minute on a host


def needs_gpu(reason: str) -> pytest.MarkDecorator:
    """Skip a test that asks what only a GPU can answer."""
    return pytest.mark.skipif(not ON_GPU, reason=f"no CUDA device: {reason}")
