"""The host's side of `kvboost_fa2` on a GPU that is not there: which kernels it takes, and what that costs."""

from typing import Any

import pytest

from tests.pretended_gpu import figures_of


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    names = "launches", "python_calls", "awq", "compilations", "token_calls", "generation"  # those with models last
    return figures_of(*names)


@pytest.mark.slow
def test_a_token_takes_few_launches(figures: dict[str, Any]) -> None:
    assert figures["launches"] == {
        "plain": [],  # PyTorch's
        "padded": ["fwd", "merge_parts"],
        "pieces": ["fwd_pieces", "fwd", "merge_parts"],
        "int4": ["fwd_codes", "fwd", "merge_parts"],
        "turboquant": ["fwd_codes", "fwd", "merge_parts"],
    }


def test_a_token_takes_few_calls_in_python(figures: dict[str, Any]) -> None:
    """There were 164, 178 with Triton 3.9, when decoding took twice as long on an H100 as with PyTorch's attention."""
    most = {"plain": 18, "square": 19, "softcap": 40, "padded": 40, "suffix": 40, "pieces": 65}
    most |= {"int4": 80, "turboquant": 80}
    found = figures["python_calls"]
    assert found.keys() == most.keys()
    assert all(found[name] <= most[name] for name in most), found


def test_a_token_of_a_model_calls_few_more_functions_than_with_sdpa(figures: dict[str, Any]) -> None:
    """In host time it is 1.06 times as long, with a model whose arithmetic takes no time."""
    found = figures["token_calls"]
    assert found["sdpa"] > 1000
    assert found["kvboost_fa2"] <= 1.1 * found["sdpa"]


@pytest.mark.slow
def test_lengths_compile_nothing(figures: dict[str, Any]) -> None:
    """What is compiled in the middle of an answer holds up a token by a second."""
    found = figures["compilations"]
    assert found["compiled"] == {
        "decoding, plain": 0,
        "decoding": 2,  # and the kernel that merges
        "decoding, padded": 1,
        "decoding, room to spare": 0,
        "suffixes": 2,  # tiles of 64 and more queries, and of fewer
        "pieces": 2,  # and that of the columns behind them
        "int4": 1,
        "turboquant": 1,
        "odd addresses": 1,
        "float32": 2,
        "odd strides": 2,
    }


def test_each_launch_is_of_the_kernel_that_triton_would_take(figures: dict[str, Any]) -> None:
    assert figures["compilations"]["launches"] > 700
    assert figures["compilations"]["wrong"] == []


@pytest.mark.daily
@pytest.mark.parametrize("model", ["llama", "mistral", "gemma2"])
def test_a_mask_of_ones_hides_no_path(figures: dict[str, Any], model: str) -> None:
    found, plain = figures["generation"], model != "gemma2"  # which has a softcap, and layers of two kinds
    prompt, suffix, token = (found[f"{model}, {step}"] for step in ("prompt", "suffix", "token"))
    assert prompt["calls"] == {"sdpa.square" if plain else "triton.attend": 2}
    assert suffix["calls"] == token["calls"] == {"triton.attend": 2}
    assert prompt["looks"] == suffix["looks"] == (1 if plain else 2)  # at the mask of each kind
    assert prompt["masked"] == suffix["masked"] == 0
    assert token["looks"] == 0


def test_a_product_of_awq_weights_is_one_launch(figures: dict[str, Any]) -> None:
    """There were two, and 72 calls in Python: seven times a layer, they took a host longer than all else of it."""
    found = figures["awq"]
    assert found["launches"] == found["compiled"] == ["gemv"]
    assert found["calls"] <= 32
