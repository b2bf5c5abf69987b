"""Training mode: reuse where nothing is drawn at random, never K/V of earlier weights, the samples of plain calls."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, attach, check_model_compatibility, last_cache
from tests.conftest import as_inputs, make_model, random_ids
from tests.parity.compare import same_as_plain

BASE = random_ids(100, seed=1)


@pytest.fixture
def store(llama: PreTrainedModel) -> ChunkStore:
    for mode in (False, True):  # probed in both
        check_model_compatibility(llama.train(mode))
    return ChunkStore(llama, chunk_size=32)


def reports(model: PreTrainedModel) -> Any:
    return last_cache(model).report


class TestWithoutDropout:
    def test_reuses(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        assert same_as_plain(llama, ChunkReuseCache(llama, store), BASE) == 0
        assert same_as_plain(llama, ChunkReuseCache(llama, store), BASE) == 96

    def test_modes_have_k_v_of_their_own(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        found = []
        for mode in (True, False, True, False):
            llama.train(mode)
            found.append(same_as_plain(llama, ChunkReuseCache(llama, store), BASE))
        assert found == [0, 0, 96, 96]

    def test_samples_what_plain_calls_sample(self, llama: PreTrainedModel) -> None:
        """From the first call on, which looks for dropout."""
        llama.train()
        kwargs = {**as_inputs(BASE), "max_new_tokens": 8, "do_sample": True}
        torch.manual_seed(0)
        plain = [llama.generate(**kwargs) for _ in range(3)]
        attach(llama, ChunkStore(llama, chunk_size=32))
        torch.manual_seed(0)
        for expected in plain:
            assert torch.equal(llama.generate(**kwargs), expected)
        assert reports(llama).reused_tokens == 96

    def test_gradients_of_a_step_are_plain_ones(self, llama: PreTrainedModel) -> None:
        attach(llama.train(), ChunkStore(llama, chunk_size=32))
        llama.generate(**as_inputs(BASE), max_new_tokens=4)
        llama(BASE, labels=BASE, use_cache=False).loss.backward()
        found = [weight.grad.clone() for weight in llama.parameters()]
        other = make_model("llama").train()
        other(BASE, labels=BASE, use_cache=False).loss.backward()
        assert all(torch.equal(ours, weight.grad) for ours, weight in zip(found, other.parameters(), strict=True))
        assert reports(llama).bypass_reason == "use_cache is False"


def module_dropout(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))


def attribute(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.attention_dropout = 0.1


class Act(nn.Module):
    """Calls a function whose name says nothing, of what it computes."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.change(x) if self.training else x)


class Centered(nn.Module):
    """Follows the mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.mean(), 0.1)
        return F.silu(x - self.mean)


def acts(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[PreTrainedModel], None]:
    def put(model: PreTrainedModel) -> None:
        model.model.layers[1].mlp.act_fn = Act(change)

    return put


_own = torch.Generator()
RANDOM = {
    "dropout, a module": (module_dropout, "`p` = 0.1"),
    "dropout by an attribute": (attribute, "layers.1.self_attn changes values at random, by `attention_dropout`"),
    "dropout that nothing tells of": (acts(lambda x: F.dropout(x, 1e-9)), "it draws random numbers"),
    "numbers of Python": (acts(lambda x: x * (random.random() > -1)), "it draws random numbers"),
    "numbers of NumPy": (acts(lambda x: x * bool(np.random.rand() > -1)), "it draws random numbers"),
    "a generator of its own": (acts(lambda x: x + torch.rand(x.shape, generator=_own)), "it draws random numbers"),
    "rows that see each other": (acts(lambda x: x - x.mean((0, 1))), "standard deviations"),
    "a running mean": (lambda m: setattr(m.model.layers[1].mlp, "act_fn", Centered()), "write to its buffers"),
}  # fmt: skip


class TestRandom:
    @pytest.mark.daily
    @pytest.mark.parametrize("what", RANDOM)
    def test_is_not_reused(self, what: str) -> None:
        """The calls with reuse leave generators and buffers where plain ones leave them, and sample the same."""
        kwargs = {**as_inputs(BASE), "max_new_tokens": 4, "do_sample": True}
        sampled, states = [], []
        for ours in (False, True):
            model = make_model("llama")
            RANDOM[what][0](model.train())
            for seed in (torch.manual_seed, random.seed, np.random.seed, _own.manual_seed):
                seed(0)
            if ours:
                attach(model, ChunkStore(model, chunk_size=32))
            sampled.append(torch.cat([model.generate(**kwargs) for _ in range(2)]))
            states.append((torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()),
                           [buffer.tolist() for buffer in model.buffers()]))  # fmt: skip
        if what != "a generator of its own":  # whose state nobody can know of
            assert torch.equal(*sampled)
            assert states[0] == states[1]
        assert reports(model).bypass_reason.startswith("in training mode, ") or what == "rows that see each other"
        assert RANDOM[what][1] in reports(model).bypass_reason
        assert reports(model).forwarded_tokens == 100

    def test_what_becomes_random_is_noticed(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        same_as_plain(llama, ChunkReuseCache(llama, store), BASE)
        cache = ChunkReuseCache(llama, store)
        for rate, reused in ((0.1, 0), (0.0, 96), (0.1, 0)):
            llama.model.layers[0].self_attn.attention_dropout = rate
            llama.generate(**as_inputs(BASE), past_key_values=cache, max_new_tokens=1)
            assert (cache.report.reused_tokens, cache.report.bypass_reason is None) == (reused, rate == 0)
            cache.reset()

    def test_checkpointing_of_gradients_is_named(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        """It gives layers no cache."""
        llama.gradient_checkpointing_enable()
        kwargs = {**as_inputs(BASE), "max_new_tokens": 4}
        plain = llama.generate(**kwargs)
        cache = ChunkReuseCache(llama, store)
        assert torch.equal(llama.generate(**kwargs, past_key_values=cache), plain)
        assert "call model.gradient_checkpointing_disable()" in cache.report.bypass_reason
        llama.gradient_checkpointing_disable()
        check_model_compatibility(llama)
        assert same_as_plain(llama, ChunkReuseCache(llama, store), BASE) == 0
        llama.gradient_checkpointing_enable()  # as TRL does around each step
        llama.gradient_checkpointing_disable()
        assert same_as_plain(llama, ChunkReuseCache(llama, store), BASE) == 96


def wide(model: PreTrainedModel) -> nn.Parameter:
    found = model.model.layers[0].mlp.gate_proj.weight
    assert isinstance(found, nn.Parameter)
    return found


def stepped(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[PreTrainedModel], None]:
    """An optimizer step by a gradient that is zero but for one row, which no sample of the weight may be from."""

    def change(model: PreTrainedModel) -> None:
        weight = wide(model)
        weight.grad = torch.zeros_like(weight)
        weight.grad[8] = 1
        make([weight]).step()
        weight.grad = None

    return change


def sharded(model: PreTrainedModel) -> None:
    """As FSDP does: weights are views of one flat parameter, which the optimizer steps."""
    weights = [wide(model), model.model.layers[0].self_attn.v_proj.weight]
    flat = nn.Parameter(torch.cat([weight.detach().reshape(-1) for weight in weights]))
    for weight, part in zip(weights, flat.detach().split([w.numel() for w in weights]), strict=True):
        weight.data = part.view(weight.shape)
    flat.grad = torch.zeros_like(flat)
    flat.grad[8 * wide(model).shape[1] :][:64] = 1
    torch.optim.SGD([flat], lr=0.5, fused=True).step()


def gathered(model: PreTrainedModel) -> None:
    """As FSDP does: the memory of a weight is freed, taken again, and filled from other places."""
    weight = wide(model)
    kept = weight.detach().clone()
    kept[8] += 0.5
    weight.data = torch.empty(0)
    weight.data = torch.empty_like(kept)
    weight.data.copy_(kept)


def in_inference_mode(model: PreTrainedModel) -> None:
    with torch.inference_mode():
        wide(model)[8].add_(0.5)


def swapped(model: PreTrainedModel) -> None:
    """As an average of weights takes their place."""
    average = wide(model).detach().clone()
    average[8] += 0.5
    wide(model).data, _ = average, wide(model).data


def tensors_swapped(model: PreTrainedModel) -> None:
    other = nn.Parameter(wide(model).detach().clone())
    with torch.no_grad():
        other[8] += 0.5
    torch.utils.swap_tensors(wide(model), other)


def loaded(model: PreTrainedModel) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["model.layers.0.mlp.gate_proj.weight"][8] += 0.5
    model.load_state_dict(state)


def merged(model: PreTrainedModel) -> None:
    wide(model).data += torch.eye(*wide(model).shape) * 0.5


@torch.no_grad()
def copied(model: PreTrainedModel) -> None:
    new = wide(model).detach().clone()
    new[8] += 0.5
    torch._foreach_copy_([wide(model)], [new])


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "AdamW": stepped(lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0, foreach=False)),
    "AdamW, foreach": stepped(lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0, foreach=True)),
    "AdamW, fused": stepped(lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0, fused=True)),
    "SGD, fused": stepped(lambda p: torch.optim.SGD(p, lr=0.5, fused=True)),
    "Adagrad, fused": stepped(lambda p: torch.optim.Adagrad(p, lr=0.5, fused=True)),
    "flat parameters": sharded,
    "gathered parameters": gathered,
    "in inference mode": in_inference_mode,
    "averages swapped in": swapped,
    "tensors swapped": tensors_swapped,
    "load_state_dict": loaded,
    "an adapter merged": merged,
    "foreach copies": copied,
}
OTHERS: dict[str, Callable[[PreTrainedModel], object]] = {
    "nothing": lambda model: None,
    "eval()": lambda model: model.eval(),
    "train()": lambda model: model.train(),
}


@pytest.mark.parametrize("how", CHANGES)
def test_changed_weights_are_noticed_by_the_first_forward(llama: PreTrainedModel, store: ChunkStore, how: str) -> None:
    live, stored = ChunkReuseCache(llama, store), lambda: ChunkReuseCache(llama, store)
    same_as_plain(llama, live, BASE)
    assert same_as_plain(llama, stored(), BASE) == 96
    for _ in range(2):
        CHANGES[how](llama)
        assert same_as_plain(llama, live, BASE) == 0
        assert same_as_plain(llama, stored(), BASE) == 96


def test_k_v_of_earlier_weights_is_dropped(llama: PreTrainedModel, store: ChunkStore) -> None:
    """Nothing could find it again; that of other adapters and modes stays."""
    sizes = []
    for _ in range(3):
        store.warm(BASE)
        llama.generate(**as_inputs(BASE), past_key_values=ChunkReuseCache(llama, store), max_new_tokens=1)
        sizes.append((len(store), store.stats()["bytes"], len(store.pinned_keys())))
        stepped(lambda p: torch.optim.SGD(p, lr=0.5, fused=True))(llama)
    assert sizes == [sizes[0]] * 3
    llama.eval()
    llama.generate(**as_inputs(BASE), past_key_values=ChunkReuseCache(llama, store), max_new_tokens=1)
    llama.train()
    llama.generate(**as_inputs(BASE), past_key_values=ChunkReuseCache(llama, store), max_new_tokens=1)
    assert len(store) == 2 * 3
    store.check_consistency()


@pytest.mark.slow
@settings(max_examples=8, deadline=None, phases=[Phase.generate], derandomize=True)
@given(changes=st.lists(st.sampled_from([*CHANGES, *OTHERS]), min_size=3, max_size=6))
def test_changes_in_any_order(changes: list[str]) -> None:
    model = make_model("llama")
    for mode in (False, True):
        check_model_compatibility(model.train(mode))
    store = ChunkStore(model, chunk_size=32)
    live = ChunkReuseCache(model, store)
    for change in changes:
        {**CHANGES, **OTHERS}[change](model)
        found = same_as_plain(model, live, BASE)
        assert not (found and change in CHANGES)
        assert same_as_plain(model, ChunkReuseCache(model, store), BASE) == 96
