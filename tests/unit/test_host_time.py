"""What reuse asks of PyTorch beside what the model does: each operator takes a host microseconds, and most of them
launch a kernel on a GPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
host_time: Any = pytest.importorskip("host_time")
sys.path.pop(0)

CHUNK, UNSEEN = host_time.CHUNK, host_time.UNSEEN
_CHUNKS, _LAYERS = 3, 8


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made: PreTrainedModel = host_time.make_model("cpu", "tiny", **host_time.SIZES | {"num_hidden_layers": _LAYERS})
    return made


@pytest.mark.parametrize("attention", ["sdpa", "kvboost_fa2"])
def test_operators_for_a_first_token(model: PreTrainedModel, attention: str) -> None:
    model.set_attn_implementation(attention)
    one, more = (_operators(model, tokens) for tokens in (CHUNK + UNSEEN, _CHUNKS * CHUNK + UNSEEN))
    # Appending two tensors, and storing the new tokens.
    assert more["live"] - more["stock"] < 9
    # The same, and columns from the store: two views of what was filled for all layers.
    assert more["stored"] - more["stock"] < 17
    # A chunk is copied by a few operators for all layers.
    assert (more["stored"] - one["stored"]) * _LAYERS <= 6 * (_CHUNKS - 1)


def _operators(model: PreTrainedModel, tokens: int) -> dict[str, float]:
    arms = host_time.arms_of(model, tokens)
    for arm in arms.values():  # the model is probed once, and a cache empty once
        arm()
    found: dict[str, float] = host_time.operators(model, arms)
    return found


@pytest.mark.parametrize("attention", ["sdpa", "kvboost_fa2"])
def test_operators_for_the_next_tokens(model: PreTrainedModel, attention: str) -> None:
    """Two tensors are written to, and two views handed out, where stock layers copy all that they hold.

    Each token costs two or three besides, and four more where generate() passes a mask of ones on to the model, as in
    transformers 5.17.
    """
    model.set_attn_implementation(attention)
    found = host_time.next_operators(model, CHUNK)
    assert found["live"] - found["stock"] < 5
    assert found["stored"] - found["stock"] < 5
