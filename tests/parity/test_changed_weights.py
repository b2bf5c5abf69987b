"""Weights and buffers changed in every way that Python allows: K/V of what was before is never used again."""

import copy
import ctypes
import pickle
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize, prune
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, check_model_compatibility
from kvboost_hf import checksum as checksums
from kvboost_hf.config import WeightsCheck
from tests.conftest import make_model, random_ids
from tests.internals.cache import Memories, ModelFingerprint, WeightsWatch, _memory, _SampleInPlace, _window
from tests.internals.top import checksum
from tests.parity.compare import same_as_plain

BASE = random_ids(100, seed=1)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def value(model: PreTrainedModel) -> nn.Linear:
    found = model.model.layers[0].self_attn.v_proj
    assert isinstance(found, nn.Linear)
    return found


def step(model: PreTrainedModel) -> None:
    weight = value(model).weight
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.3).step()
    weight.grad = None


def under_no_grad(change: Callable[[torch.Tensor], object]) -> Callable[[PreTrainedModel], object]:
    def run(model: PreTrainedModel) -> None:
        with torch.no_grad():
            change(value(model).weight)

    return run


def tie(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[0].mlp.gate_proj.weight


def replace_forward(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].mlp
    forward = layer.forward
    layer.forward = lambda x: 2 * forward(x)


SEEN: dict[str, Callable[[PreTrainedModel], object]] = {
    "an optimizer step": step,
    "data +=": lambda m: value(m).weight.data.add_(0.3),
    "data = another": lambda m: setattr(value(m).weight, "data", value(m).weight.data.roll(1, 0)),
    "data = its transpose": lambda m: setattr(m.model.layers[0].self_attn.q_proj.weight, "data",
                                              m.model.layers[0].self_attn.q_proj.weight.data.t()),
    "another parameter": lambda m: setattr(value(m), "weight", nn.Parameter(value(m).weight.detach() * 2)),
    "one value": under_no_grad(lambda w: w[3, 5].add_(5)),
    "one row": under_no_grad(lambda w: w[7].fill_(1)),
    "copy_": under_no_grad(lambda w: w.copy_(w.roll(1, 0))),
    "init": lambda m: nn.init.normal_(value(m).weight),
    "load_state_dict": lambda m: m.load_state_dict(make_model("llama", seed=5).state_dict()),
    "load_state_dict(assign=True)": lambda m: m.load_state_dict(make_model("llama", seed=5).state_dict(), assign=True),
    "to(float64)": lambda m: m.double(),
    "bfloat16 and back": lambda m: m.bfloat16().float(),
    "a parametrization": lambda m: parametrize.register_parametrization(value(m), "weight", Doubled()),
    "pruning": lambda m: prune.l1_unstructured(value(m), "weight", amount=0.5),
    "tying": tie,
    "a buffer": lambda m: m.model.rotary_emb.inv_freq.mul_(0.5),
    "a buffer's data": lambda m: m.model.rotary_emb.inv_freq.data[3:4].mul_(0.5),
    "a bias that was none": lambda m: setattr(value(m), "bias", nn.Parameter(torch.ones(32))),
    "a norm's data": lambda m: m.model.layers[1].input_layernorm.weight.data[9:10].mul_(3),
    "another module": lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.ReLU()),
    "another forward": replace_forward,
    "resizing the vocabulary": lambda m: m.resize_token_embeddings(210),
}  # fmt: skip


def swap_rows(model: PreTrainedModel) -> None:
    rows = wide(model).data
    rows[8], rows[12] = rows[12].clone(), rows[8].clone()


def wide(model: PreTrainedModel) -> nn.Parameter:
    """More values than are sampled."""
    found = model.model.layers[0].mlp.gate_proj.weight
    assert isinstance(found, nn.Parameter)
    return found


# What PyTorch does not count, and a sample of the values misses.
THROUGH_DATA: dict[str, Callable[[PreTrainedModel], object]] = {
    "one value of data": lambda m: wide(m).data[8, 5].add_(5),
    "one row of data": lambda m: wide(m).data[8].fill_(1),
    "two rows of data swapped": swap_rows,
    "signs of a row of data": lambda m: wide(m).data[8].neg_(),
    "NumPy over data": lambda m: wide(m).data.numpy()[8].fill(1),
}
HIDDEN: dict[str, Callable[[PreTrainedModel], object]] = {
    "data of a row": lambda m: wide(m)[8].data.fill_(1),
    "through NumPy": lambda m: wide(m).detach().numpy()[8].fill(1),
}


@pytest.fixture
def store(llama: PreTrainedModel) -> ChunkStore:
    check_model_compatibility(llama)
    return ChunkStore(llama, chunk_size=32)


@pytest.mark.parametrize("how", [*SEEN, *THROUGH_DATA])
def test_between_calls(llama: PreTrainedModel, store: ChunkStore, how: str) -> None:
    live = ChunkReuseCache(llama, store)
    assert same_as_plain(llama, live, BASE) == 0
    assert same_as_plain(llama, live, BASE) == 99
    {**SEEN, **THROUGH_DATA}[how](llama)
    check_model_compatibility(llama.eval())
    fresh = ChunkReuseCache(llama, store)
    assert same_as_plain(llama, fresh, BASE) == 0
    assert same_as_plain(llama, live, BASE) >= 96


class TestData:
    """Whoever holds `weight.data` may write to it at any time."""

    @pytest.mark.daily
    @pytest.mark.parametrize("before", ["the first prompt", "the second"])
    def test_kept(self, llama: PreTrainedModel, before: str) -> None:
        taken = wide(llama).data if before == "the first prompt" else None
        fingerprint = ModelFingerprint()
        fingerprint.current(llama)
        row = (wide(llama).data if taken is None else taken)[8]
        del taken
        seen = [fingerprint.current(llama) for _ in range(2)]
        for number in range(3):
            row[number] += 1
            seen += [fingerprint.current(llama) for _ in range(2)]
        assert seen[::2] == seen[1::2]
        assert len(set(seen)) == 4

    def test_only_read(self, llama: PreTrainedModel) -> None:
        """Nothing is stored in vain, and a weight that nobody holds any more is not read again."""
        fingerprint = ModelFingerprint()
        before = fingerprint.current(llama)
        kept = [wide(llama).data, *llama.state_dict().values()]
        assert fingerprint.current(llama) == before
        copy.deepcopy(llama)
        pickle.dumps(value(llama).weight)
        assert _shared(llama)
        del kept
        assert fingerprint.current(llama) == before
        assert not _shared(llama)

    def test_two_models_with_one_weight(self, llama: PreTrainedModel) -> None:
        twin = make_model("llama")
        twin.model.layers[0].mlp.gate_proj.weight = wide(llama)
        models = (llama, twin)
        fingerprints = [ModelFingerprint() for _ in models]
        before = [fingerprint.current(model) for fingerprint, model in zip(fingerprints, models, strict=True)]
        wide(llama).data[8] = 1
        now = [fingerprint.current(model) for fingerprint, model in zip(fingerprints, models, strict=True)]
        assert before[0] != now[0]
        assert before[1] != now[1]

    def test_parameters_of_others(self) -> None:
        """The property is there for all parameters: those without memory, of fake tensors, in compiled code."""
        weight = nn.Parameter(torch.ones(2, 3))
        Memories([weight])
        assert "data" in vars(nn.Parameter)
        later = nn.UninitializedParameter()
        later.materialize((2, 3))
        assert later.data.shape == (2, 3)
        with FakeTensorMode() as mode:
            assert mode.from_tensor(weight).data.shape == (2, 3)
        compiled = torch.compile(lambda x: x + weight.data, fullgraph=True, backend="eager")
        assert compiled(torch.ones(3)).tolist() == [[2.0] * 3] * 2
        weight.data = torch.zeros(1)
        assert weight.tolist() == [0]

    def test_memory_on_another_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is read by operators there, which whoever counts or replaces operators does not see."""
        weight = nn.Parameter(torch.randn(40, 7, dtype=torch.bfloat16))
        monkeypatch.setattr("kvboost_hf.cache.identity.weights._READ_IN_PLACE", "nothing")
        memories = Memories([weight])
        assert memories.writes([weight]) == 0
        with FakeTensorMode(allow_non_fake_inputs=True):
            weight.data  # noqa: B018
        assert memories.writes([weight]) == 0
        weight.data[39, 6] += 1
        assert memories.writes([weight]) == 1


def _shared(model: PreTrainedModel) -> list[str]:
    return [name for name, weight in model.named_parameters() if _memory(weight).is_shared]


def _square(model: PreTrainedModel) -> nn.Parameter:
    found: nn.Parameter = model.model.layers[1].self_attn.q_proj.weight
    assert found.shape[0] == found.shape[1]
    return found


def _swap(weight: nn.Parameter) -> None:
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().t()))


def _set_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.t()


# The same memory, read in another order: no value is another one, and no address.
TURNED: dict[str, Callable[[nn.Parameter], object]] = {
    "t_": lambda weight: weight.detach_().t_().requires_grad_(),
    "set_": lambda weight: weight.set_(weight.detach().t()),  # type: ignore[call-overload]
    "as_strided_": lambda weight: weight.as_strided_(weight.shape, weight.stride()[::-1]),
    "data": _set_data,
    "data of torch": lambda weight: torch.Tensor.data.__set__(weight, weight.data.t()),  # type: ignore[attr-defined]
    "set_data": lambda weight: torch.ops.aten.set_data(weight, weight.data.t()),
    "swap_tensors": _swap,
}


class TestForms:
    @pytest.mark.daily
    @pytest.mark.parametrize("how", TURNED)
    def test_a_weight_that_is_turned(self, llama: PreTrainedModel, how: str) -> None:
        fingerprint, weight = ModelFingerprint(), _square(llama)
        before = fingerprint.current(llama)
        assert fingerprint.current(llama) == before
        with torch.no_grad():
            TURNED[how](weight)
        assert fingerprint.current(llama) != before

    def test_a_buffer_that_is_turned(self, llama: PreTrainedModel) -> None:
        fingerprint, buffer = ModelFingerprint(), torch.randn(4, 4)
        llama.model.register_buffer("kept", buffer)
        before = fingerprint.current(llama)
        assert fingerprint.current(llama) == before
        _set_data(buffer)
        assert fingerprint.current(llama) != before

    def test_data_of_another_model_says_nothing(self, llama: PreTrainedModel) -> None:
        fingerprint, other = ModelFingerprint(), nn.Linear(4, 4)
        before = fingerprint.current(llama)
        _set_data(other.weight)
        assert fingerprint.current(llama) == before


class TestWrittenByForwards:
    """Weights that each forward writes to, and leaves as they are."""

    def test_found_unchanged_from_their_second_version_on(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        llama.model.embed_tokens.max_norm = 1e3
        cache = ChunkReuseCache(llama, store)
        assert [same_as_plain(llama, cache, BASE) >= 96 for _ in range(4)] == [False, False, True, True]

    def test_what_a_hook_undoes_at_the_next_token_is_a_change(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        def turn(layer: nn.Module, args: Any) -> None:
            with torch.no_grad():
                value(llama).weight[3, 5] *= next(factors)

        factors = cycle((1, -1, -1, 1))  # of the four forwards of a call
        llama.model.layers[0].register_forward_pre_hook(turn)
        cache = ChunkReuseCache(llama, store)
        for _ in range(4):
            llama.generate(BASE, past_key_values=cache, max_new_tokens=4)
            assert not cache.report.reused_tokens

    @pytest.mark.parametrize("changed", ["one", "another", "both"])
    def test_a_write_beside_the_sample(self, changed: str) -> None:
        """One value of many is written in turn: the sample sees nothing, the hash does."""
        weights = [torch.zeros(64, 97), torch.zeros(64, 97)]
        watch, places = WeightsWatch(), {"one": [0], "another": [1], "both": [0, 1]}[changed]
        epochs = [watch.epoch(weights)]
        for number in (0, 0, 5, 5, 0, 0, 7):
            before = watch.sample
            for at in places:
                weights[at][1, 1] = number
            epochs.append(watch.epoch(weights))
            assert watch.sample == before
        grown = [now > then for then, now in pairwise(epochs)]
        assert grown == [True, False, True, False, True, False, True]

    def test_what_has_moved_since_is_no_earlier_content(self) -> None:
        """A hash counts at the next version alone, of the same memory."""
        weight = nn.Parameter(torch.zeros(64, 97), requires_grad=False)
        watch = WeightsWatch()
        epochs = [watch.epoch([weight])]
        for change in (
            lambda: weight.add_(0),  # hashed
            lambda: weight.fill_(1),  # the sample sees it
            lambda: weight.fill_(0),  # and that it is back
            lambda: weight.add_(0),  # hashed anew
            lambda: setattr(weight, "data", torch.zeros(64, 97)),
            lambda: weight.add_(0),
        ):
            change()
            epochs.append(watch.epoch([weight]))
        assert epochs == [*range(7)]
        weight.add_(0)
        assert watch.epoch([weight]) == 6


class TestFullCheck:
    """Every bit counts, and weights that are changed back find their K/V again."""

    @pytest.mark.daily
    @pytest.mark.parametrize("how", [*SEEN, *THROUGH_DATA, *HIDDEN])
    def test_notices(self, llama: PreTrainedModel, how: str) -> None:
        fingerprint = ModelFingerprint()
        before = fingerprint.current(llama, full=True)
        assert fingerprint.current(llama, full=True) == before
        {**SEEN, **THROUGH_DATA, **HIDDEN}[how](llama)
        assert fingerprint.current(llama.eval(), full=True) != before

    @pytest.mark.daily
    @pytest.mark.parametrize("how", HIDDEN)
    def test_the_sample_misses_what_it_is_for(self, llama: PreTrainedModel, how: str) -> None:
        fingerprint = ModelFingerprint()
        before = fingerprint.current(llama)
        HIDDEN[how](llama)
        assert fingerprint.current(llama) == before

    @pytest.mark.parametrize("how", HIDDEN)
    def test_no_stale_answer(self, llama: PreTrainedModel, store: ChunkStore, how: str) -> None:
        policy = ReusePolicy(weights_check="full")
        store.warm(BASE, policy=policy)
        live = ChunkReuseCache(llama, store, policy)
        assert same_as_plain(llama, live, BASE) >= 96
        HIDDEN[how](llama)
        assert same_as_plain(llama, live, BASE) == 0
        assert same_as_plain(llama, ChunkReuseCache(llama, store, policy), BASE) >= 96

    def test_changed_back(self, llama: PreTrainedModel) -> None:
        fingerprint, weights = ModelFingerprint(), copy.deepcopy(llama.state_dict())
        before = fingerprint.current(llama, full=True)
        step(llama)
        assert fingerprint.current(llama, full=True) != before
        llama.load_state_dict(weights)
        assert fingerprint.current(llama, full=True) == before
        fingerprint.bump()
        assert fingerprint.current(llama, full=True) != before

    def test_it_shares_nothing_with_the_sampled_one(self, llama: PreTrainedModel) -> None:
        fingerprint = ModelFingerprint()
        assert fingerprint.current(llama) != fingerprint.current(llama, full=True)

    def test_what_is_stored_with_it_is_checked(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        for policy in (ReusePolicy(weights_check="full"), ReusePolicy()):
            same_as_plain(llama, ChunkReuseCache(llama, store, policy), BASE)
        report = store.check_integrity()
        assert (report.checked, report.skipped) == (len(store), 0)
        kept = value(llama).weight.detach().clone()
        under_no_grad(lambda weight: weight.zero_())(llama)
        assert store.check_integrity().checked == 0
        under_no_grad(lambda weight: weight.copy_(kept))(llama)
        report = store.check_integrity()
        assert (report.checked, report.wrong) == (len(store), 0)  # those found by all weights; the others are gone
        assert report.checked

    @pytest.mark.daily
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn])
    @pytest.mark.parametrize("n", [1, 3, 5, 65_536, 70_001, 1_200_007])
    def test_checksum_sees_every_place(self, dtype: torch.dtype, n: int) -> None:
        octets = torch.randint(0, 2, (n * dtype.itemsize,), dtype=torch.uint8)
        before = checksum([octets.view(dtype)])
        for at in {0, n // 2, n - 1}:
            changed = octets.clone()
            changed[at * dtype.itemsize] ^= 1
            assert checksum([changed.view(dtype)]) != before
        assert checksum([octets.clone().view(dtype)]) == before

    @pytest.mark.daily
    @pytest.mark.parametrize("threads", [1, 3])
    def test_sums_are_those_of_any_device(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """NumPy computes them on a CPU, and PyTorch elsewhere."""
        monkeypatch.setattr(checksums, "_ROWS_OF_A_THREAD", 1)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        row, rows = checksums._ROW, 5
        words = torch.randint(-(2**31), 2**31, (rows * row + 7,), dtype=torch.int32)
        factors = checksums._coefficients(words.device)
        whole = (words[: rows * row].view(rows, row) * factors).sum(dim=1)
        rest = (words[rows * row :] * factors[:7]).sum(dim=0, keepdim=True)
        assert torch.equal(torch.cat(list(checksums._row_sums(words))), torch.cat([whole, rest]))

    def test_checksum_sees_order_shape_and_views(self) -> None:
        a, b = torch.randn(8, 6), torch.randn(8, 6)
        different = [[a, b], [b, a], [a], [a.view(6, 8), b], [a.t(), b], [a.double(), b], [a, -b], []]
        assert len({checksum(case) for case in different}) == len(different)
        assert checksum([a.t().contiguous()]) == checksum([a.t()])
        assert checksum([torch.cat([a, a]).view(-1)[1:9]]) == checksum([a.view(-1)[1:9].clone()])


class TestModules:
    """What is kept on modules, outside of parameters and buffers."""

    def test_a_steering_vector(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        class Steered(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner, self.vector, self.times = inner, torch.zeros(64), 1.0

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return self.inner(*args, **kwargs) + self.times * self.vector

        llama.model.layers[0].mlp = steered = Steered(llama.model.layers[0].mlp).eval()
        check_model_compatibility(llama)  # with the new layer
        cache = ChunkReuseCache(llama, store)
        assert same_as_plain(llama, cache, BASE) == 0
        steered.vector = torch.randn(64)
        assert same_as_plain(llama, cache, BASE) == 0
        steered.vector[5] = 9
        assert same_as_plain(llama, cache, BASE) == 0
        steered.times = 2.0
        assert same_as_plain(llama, cache, BASE) == 0
        steered.times = 1.0
        assert same_as_plain(llama, cache, BASE) >= 96

    def test_a_class_patched(self, llama: PreTrainedModel, store: ChunkStore, monkeypatch: Any) -> None:
        cache, kind = ChunkReuseCache(llama, store), type(llama.model.layers[0].mlp)
        assert same_as_plain(llama, cache, BASE) == 0
        forward = kind.forward
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", lambda self, x: 2 * forward(self, x))
            assert same_as_plain(llama, cache, BASE) == 0
        same_as_plain(llama, cache, BASE)

    def test_another_attention(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        fingerprint = ModelFingerprint()
        before = fingerprint.current(llama)
        llama.set_attn_implementation("eager")
        assert fingerprint.current(llama) != before
        llama.set_attn_implementation("sdpa")
        assert fingerprint.current(llama) == before


def test_what_generate_notes_on_a_model_is_no_change(llama: PreTrainedModel) -> None:
    fingerprint = ModelFingerprint()
    before = fingerprint.current(llama)
    for n in (20, 60):
        llama.generate(BASE[:, :n], max_new_tokens=2, cache_implementation="static")
        assert fingerprint.current(llama) == before


def test_a_fingerprint_keeps_no_weights_in_memory(llama: PreTrainedModel) -> None:
    """Whoever moves a model to free memory gets it."""
    fingerprint = ModelFingerprint()
    for full in (False, True):
        fingerprint.current(llama, full=full)
        freed = torch.multiprocessing.reductions.StorageWeakRef(value(llama).weight.untyped_storage())
        llama.to(torch.float64 if not full else torch.float32)  # type: ignore[arg-type]
        assert freed.expired()


def test_saved_and_loaded(llama: PreTrainedModel, store: ChunkStore, tmp_path: Any) -> None:
    """Hooks are not saved; the copy reuses its own K/V, and all weights read say that it is the same model."""
    same_as_plain(llama, ChunkReuseCache(llama, store), BASE)
    llama.save_pretrained(tmp_path)
    twin = type(llama).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="another model object"):
        ChunkReuseCache(twin, store)
    assert same_as_plain(twin, ChunkReuseCache(twin), BASE) == 0
    for dtype in (torch.float16, torch.float32):
        halved = copy.deepcopy(llama).to(dtype)  # type: ignore[arg-type]
        cache = ChunkReuseCache(halved, ChunkStore(halved, chunk_size=32))
        check_model_compatibility(halved)
        assert [same_as_plain(halved, cache, BASE, atol=5e-2) for _ in range(2)] == [0, 99]


def _misaligned() -> torch.Tensor:
    return torch.arange(1024, dtype=torch.uint8)[3:1003].view(torch.int8)


SAMPLED: dict[str, Callable[[], torch.Tensor]] = {
    "a matrix": lambda: torch.randn(64, 96),
    "a short vector": lambda: torch.randn(12)[::3],
    "a long vector": lambda: torch.randn(5000),
    "transposed": lambda: torch.randn(64, 96).t(),
    "part of another": lambda: torch.randn(64, 96)[3:40, 5:50],
    "bfloat16": lambda: torch.randn(64, 96).bfloat16(),
    "complex": lambda: torch.randn(40, 30, dtype=torch.complex128),
    "not at a multiple of its size": _misaligned,
    "one value": lambda: torch.tensor(3.0),
    "repeated": lambda: torch.randn(1, 40).expand(30, 40),
}


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors are; the host may be read as a device would be."""

    def device_words(device: torch.device, address: int, count: int, word: int) -> torch.Tensor:
        memory: Any = (ctypes.c_char * (count * word)).from_address(address)
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
        return torch.frombuffer(memory, dtype=kind)

    if request.param == "device":
        monkeypatch.setattr("kvboost_hf.cache.identity.weights._HOST", "nothing")
        monkeypatch.setattr("kvboost_hf.cache.identity.weights._reads_addresses", lambda device: True)
        monkeypatch.setattr("kvboost_hf.cache.identity.weights._device_words", device_words)
    return str(request.param)


def sampled(tensors: Sequence[torch.Tensor]) -> _SampleInPlace:
    return _SampleInPlace(tensors)


def values(sample: _SampleInPlace, tensors: Sequence[torch.Tensor]) -> bytes:
    """All that was read."""
    read = sample.read(tensors)
    assert read is not None
    on_host, on_devices = read
    return on_host + b"".join(each.cpu().numpy().tobytes() for each in on_devices)


class TestSampleInPlace:
    """Values that are read at their addresses are those that views of the tensors have."""

    @pytest.mark.daily
    @pytest.mark.parametrize("kind", SAMPLED)
    def test_as_views(self, kind: str, place: str) -> None:
        tensor = SAMPLED[kind]()
        offset, sizes, strides = _window(tensor) or (tensor.storage_offset(), tensor.shape, tensor.stride())
        view = tensor.as_strided(sizes, strides, offset).contiguous()
        found = sampled([tensor]).read([tensor])
        assert found is not None
        assert bool(found[0]) == (place == "host")
        assert values(sampled([tensor]), [tensor]) == view.flatten().view(torch.uint8).numpy().tobytes()

    @pytest.mark.daily
    def test_all_at_once(self, place: str) -> None:
        tensors = [make() for make in SAMPLED.values()]
        sample = sampled(tensors)
        before = values(sample, tensors)
        assert values(sample, tensors) == before
        for tensor in tensors:
            first = tensor.as_strided((1,), (1,), tensor.storage_offset())
            now = values(sample, tensors)
            first.copy_(first + 1)
            assert values(sample, tensors) != now

    @pytest.mark.daily
    def test_small_ones_are_read_whole(self, place: str) -> None:
        assert [_window(torch.ones(n)) is None for n in (127, 128, 129)] == [True, True, False]

    @pytest.mark.daily
    def test_without_memory(self, place: str) -> None:
        """FSDP takes memory from weights between their forwards; meta tensors and empty ones have none."""
        freed = torch.randn(64, 96)
        freed.untyped_storage().resize_(0)
        tensors = [torch.empty(0, 3), freed, torch.ones(3)]
        assert len(values(sampled(tensors), tensors)) == 12

    @pytest.mark.daily
    def test_what_comes_back_may_be_anything(self, place: str) -> None:
        freed = torch.randn(64, 96)
        watch, tensors = WeightsWatch(), [freed, torch.ones(3)]
        whole = watch.epoch(tensors)
        freed.untyped_storage().resize_(0)
        assert [watch.epoch(tensors) for _ in range(3)] == [whole + 1, whole + 2, whole + 3]
        freed.untyped_storage().resize_(64 * 96 * 4)
        assert [watch.epoch(tensors) for _ in range(2)] == [whole + 4] * 2

    @pytest.mark.daily
    @pytest.mark.parametrize("full", [False, True])
    def test_weights_without_memory_have_no_durable_name(self, llama: PreTrainedModel, place: str, full: bool) -> None:
        fingerprint, memory = ModelFingerprint(), wide(llama).untyped_storage()
        named, kept, nbytes = fingerprint.durable(llama, full=full), wide(llama).detach().clone(), memory.nbytes()
        assert isinstance(named, bytes)
        memory.resize_(0)
        assert "memory" in str(fingerprint.durable(llama, full=full))
        assert len({fingerprint.current(llama, full=full) for _ in range(3)}) == 3
        memory.resize_(nbytes)
        with torch.no_grad():
            wide(llama).copy_(kept)
        assert fingerprint.durable(llama, full=full) == named

    @pytest.mark.daily
    def test_a_write_that_nobody_counts(self, place: str) -> None:
        tensors = [torch.randn(64, 96), torch.randn(12)]
        watch = WeightsWatch()
        before = watch.epoch(tensors), watch.sample
        assert (watch.epoch(tensors), watch.sample) == before
        tensors[1].numpy()[3] += 1
        assert watch.epoch(tensors) == before[0] + 1
        assert watch.sample != before[1]

    @pytest.mark.daily
    def test_other_memory_while_it_is_read(
        self, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        """Another thread may give a weight other memory at any time: what is gone is not read."""
        fingerprint, weight = ModelFingerprint(), wide(llama)
        fingerprint.current(llama)
        writes = Memories.writes

        def meanwhile(self: Memories, tensors: Any) -> int | None:
            found = writes(self, tensors)
            monkeypatch.setattr(Memories, "writes", writes)
            weight.data = weight.data.clone()
            return found

        monkeypatch.setattr(Memories, "writes", meanwhile)
        tensors = list(llama.parameters())
        sample = sampled(tensors)
        assert sample.read(tensors) is not None
        now = fingerprint.current(llama)
        assert fingerprint.current(llama) == now
        assert sample.read(tensors) is None

    @pytest.mark.daily
    def test_memory_that_is_gone_once_it_is_looked_at(self, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        """It is looked at again."""
        tensors, watch, read, calls = [torch.randn(64, 96), torch.randn(12)], WeightsWatch(), _SampleInPlace.read, [0]

        def gone(self: _SampleInPlace, tensors: Any) -> Any:
            calls[0] += 1
            return None if calls[0] == 1 else read(self, tensors)

        monkeypatch.setattr(_SampleInPlace, "read", gone)
        before = watch.epoch(tensors)
        assert watch.epoch(tensors) == before
        tensors[1].numpy()[3] += 1
        assert watch.epoch(tensors) == before + 1

    @pytest.mark.daily
    def test_a_tensor_without_an_address(self, place: str) -> None:
        ones = torch.ones(3)
        tensors = [torch.Tensor._make_wrapper_subclass(Wrapped, (64, 96)), ones]
        assert values(_SampleInPlace(tensors), tensors) == ones.numpy().tobytes()

    def test_a_device_that_cannot_be_read_at_addresses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its tensors are read by views."""
        monkeypatch.setattr("kvboost_hf.cache.identity.weights._reads_addresses", lambda device: False)
        tensors = [torch.randn(64, 96), torch.randn(12)]
        watch = WeightsWatch()
        before = watch.epoch(tensors)
        assert watch.epoch(tensors) == before
        tensors[1].numpy()[3] += 1
        assert watch.epoch(tensors) == before + 1


@torch.no_grad()
def test_what_weights_of_two_kinds_have_computed_is_not_stored(llama: PreTrainedModel) -> None:
    """A hook changes those of a layer in the middle of a forward."""
    store = ChunkStore(llama, chunk_size=32)
    cache = ChunkReuseCache(llama, store)

    def change(*given: Any) -> None:
        llama.model.layers[1].self_attn.v_proj.weight.add_(0.3)

    with llama.model.layers[0].register_forward_hook(change):
        llama(BASE, past_key_values=cache, logits_to_keep=1)
    assert (cache.get_seq_length(), cache.store_all(), len(store)) == (100, [], 0)


@pytest.mark.parametrize("check", ["sample", "full"])
def test_memory_that_is_there_in_forwards_only(
    tmp_path: Path, check: WeightsCheck, caplog: pytest.LogCaptureFixture
) -> None:
    """As FSDP and ZeRO 3 do, by hooks on modules: no K/V is kept, and answers are those of the model."""
    model = make_model("llama")
    expected = model.generate(BASE, max_new_tokens=5)
    for layer in model.model.layers:
        module = layer.mlp.gate_proj
        memory, kept = module.weight.untyped_storage(), module.weight.detach().clone()

        def take(module: nn.Linear, given: Any, kept: torch.Tensor = kept) -> None:
            module.weight.untyped_storage().resize_(kept.nbytes)
            with torch.no_grad():
                module.weight.copy_(kept)

        def give_back(module: nn.Linear, given: Any, output: Any) -> None:
            module.weight.untyped_storage().resize_(0)

        module.register_forward_pre_hook(take)
        module.register_forward_hook(give_back)
        memory.resize_(0)
    policy = ReusePolicy(weights_check=check)
    with ChunkStore(model, chunk_size=16, tiers=[f"disk:{tmp_path}"]) as store:
        cache = ChunkReuseCache(model, store, policy)
        for held in (cache, cache, ChunkReuseCache(model, store, policy)):
            assert torch.equal(model.generate(BASE, max_new_tokens=5, past_key_values=held), expected)
            assert held.report.forwarded_tokens == 100
            assert store.stats()["tiers"]["ram"]["chunks"] == 0
    assert "kept in host memory only" in caplog.text


class Wrapped(torch.Tensor):
    """A tensor of a library that has its data elsewhere."""

    @classmethod
    def __torch_dispatch__(cls, *given: Any, **more: Any) -> Any:
        raise NotImplementedError


class Scaled(nn.Module):
    """An activation whose factor lies in a container, as its only item or under the key 0."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * self.held[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ([1],) * 2,
        lambda: ({0: 1},) * 2,
        lambda: (deque([1]),) * 2,
        lambda: (bytearray([1]),) * 2,
        lambda: (array("d", [1]),) * 2,
        lambda: ((data := bytearray([1])), memoryview(data)),
        lambda: ((under := {0: 1}), MappingProxyType(under)),
    ],
    ids=["list", "dict", "deque", "bytearray", "array", "memoryview", "mappingproxy"],
)
def test_numbers_in_containers_of_modules(llama: PreTrainedModel, make: Callable[[], tuple[Any, Any]]) -> None:
    written, held = make()
    llama.model.layers[0].mlp.act_fn = Scaled(held)
    check_model_compatibility(llama)
    store, ids = ChunkStore(llama, chunk_size=16), random_ids(100, seed=4)
    cache = ChunkReuseCache(llama, store)
    assert same_as_plain(llama, cache, ids) == 0
    assert same_as_plain(llama, cache, ids) == 99
    written[0] = 3
    check_model_compatibility(llama)
    assert same_as_plain(llama, ChunkReuseCache(llama, store), ids) == 0
    assert same_as_plain(llama, cache, ids) > 90
