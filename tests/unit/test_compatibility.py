"""What check_model_compatibility says, to whom, and what it costs."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import BertConfig, BertLMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import check_model_compatibility
from tests.conftest import counted, make_model
from tests.internals.assisted import branch_reason
from tests.internals.cache import Measure, blend_reason, make_layers
from tests.internals.compat import probe_reason
from tests.internals.top import known_architectures

pytestmark = pytest.mark.daily


class HomeMade(LlamaForCausalLM):
    """A class that no test of ours runs."""


def bert() -> PreTrainedModel:
    return BertLMHeadModel(BertConfig(vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2))


def test_a_model_that_is_known_says_nothing_aloud(llama: PreTrainedModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for strict in (True, False):
            report = check_model_compatibility(llama, strict=strict)
    assert report.exact
    assert report.moved
    assert report.streaming
    assert report.tested
    assert str(report) == "LlamaForCausalLM: exact reuse: yes; moved chunks: yes; streaming: yes"


def test_one_that_cannot_is_refused_or_warned_of() -> None:
    with pytest.raises(ValueError, match="BertLMHeadModel cannot reuse K/V: it is not causal"):
        check_model_compatibility(bert().eval())
    with pytest.warns(UserWarning, match="BertLMHeadModel cannot reuse K/V: it is not causal"):
        report = check_model_compatibility(bert().eval(), strict=False)
    assert not report.exact
    assert "not causal" in str(report.reason)
    assert report.moved_reason == "nothing of it can be reused"


def test_one_that_is_not_tested_is_warned_of() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    model = HomeMade(LlamaConfig(vocab_size=200, **sizes)).eval()
    with pytest.warns(UserWarning, match="HomeMade is not among the architectures"):
        report = check_model_compatibility(model)
    assert report.exact
    assert str(report).startswith("HomeMade (not tested): exact reuse: yes")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen2", None),
        ("phi", None),  # partial rotation
        ("gemma2", None),
        ("gpt2", "its positions are not rotary"),
        ("bloom", "its forward takes no position_ids"),
        ("deepseek_v3", None),  # rotated keys are kept as values
        ("qwen3_next", "only keys and values can be moved, and it keeps something else (LinearAttentionLayer)"),
    ],
)
def test_what_can_be_moved(name: str, reason: str | None) -> None:
    assert check_model_compatibility(make_model(name)).moved_reason == reason


def test_our_layers_are_those_that_compat_knows() -> None:
    for name in ("llama", "mistral", "falcon_h1"):
        assert make_layers(make_model(name))
    assert "LlamaForCausalLM" in known_architectures()


def test_what_a_release_has_broken_is_tested_with_those_before_it() -> None:
    works = Version(transformers.__version__) < Version("5.24")
    assert ("Llama4ForConditionalGeneration" in known_architectures()) == works


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_next"])
def test_the_probe_runs_once_on_few_tokens(name: str) -> None:
    model = make_model(name)
    with counted(model) as work:
        assert probe_reason(model) is None
    assert work.calls <= 3
    assert work.tokens <= 24
    with counted(model) as work:
        assert probe_reason(model) is None
    assert work.calls == 0


def test_the_probe_leaves_no_trace(llama: PreTrainedModel) -> None:
    before = {name: value.clone() for name, value in llama.state_dict().items()}
    state = torch.get_rng_state()
    check_model_compatibility(llama)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in llama.state_dict().items())
    assert not llama.training


@pytest.mark.parametrize("when", ["once", "always"])
def test_a_probe_that_a_hook_makes_fail_is_run_again(llama: PreTrainedModel, when: str) -> None:
    def fail(*_: Any) -> None:
        if when == "once":
            handle.remove()
        raise RuntimeError("not this time")

    handle = llama.model.layers[-1].register_forward_pre_hook(fail)
    other = llama.lm_head.register_forward_hook(lambda *_: None)
    reasons = (probe_reason, branch_reason, partial(blend_reason, measure=Measure.NOTHING))
    for reason in reasons[: None if when == "always" else 1]:
        assert "not this time" in str(reason(llama))
    handle.remove()
    other.remove()
    assert [reason(llama) for reason in reasons] == [None] * 3
    with counted(llama) as work:
        assert probe_reason(llama) is None
    assert not work.calls
