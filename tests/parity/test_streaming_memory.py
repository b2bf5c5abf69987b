"""The memory that a GPU takes while a model is loaded and while it runs, against the plan: on a device that counts it.

Loading is the real one. The system of the host pins what a test allows.
"""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import StreamingConfig, load_streamed, streaming_plan, streaming_stats
from tests.device_double import CUDA, DoubleDevice, DoubleTensor
from tests.internals.offload import CudaBackend, Pinning, ResidencyPlan, build

TOKENS, LAYERS, VOCAB = 32, 8, 4096
PIECE_BYTES = 100_000
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
)
TABLE_BYTES = 4 * VOCAB * 64
BUDGET = 36_150_000  # of which workspaces take 34; with one table on the device, three layers stay
KEPT_BYTES = 3 * PIECE_BYTES  # for buffers


class Machine:
    """A GPU, its CUDA runtime, and the system of the host.

    Args:
        pins: Bytes of host memory that can be pinned at a time.
        maps: Whether the GPU can read pinned memory in place.
        free: Bytes that other programs leave of the GPU.
    """

    def __init__(self, gpu: DoubleDevice, pins: int = 2**40, maps: bool = True, free: int = 2**40) -> None:
        self.gpu, self.pins, self.maps, self.free = gpu, pins, maps, free
        self.registered: dict[int, int] = {}
        self.copies, self.piece_bytes = 0, PIECE_BYTES

    def register(self, address: int, nbytes: int) -> None:
        if sum(self.registered.values()) + nbytes > self.pins:
            raise RuntimeError("cudaHostRegister returned 2")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def map(self, flat: torch.Tensor) -> torch.Tensor:
        if not self.maps:
            raise RuntimeError("cuMemHostGetDevicePointer returned 801")
        assert self.is_pinned(flat)
        return DoubleTensor(flat, self.gpu)

    # As a `LayerLink`

    def new_stream(self, device: torch.device) -> Any:
        return self.gpu.stream("copies", CUDA)

    def current(self, device: torch.device) -> Any:
        return self.gpu.current(CUDA)

    def record(self, stream: Any, *, timed: bool = False) -> Any:
        event = self.gpu.record(stream)
        setattr(event, "elapsed_time", lambda end: 1.0)  # noqa: B010
        return event

    def allocate(self, nbytes: int, device: torch.device, stream: Any) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=CUDA)

    def pinned(self, shape: torch.Size, dtype: torch.dtype, *, warns: bool = True) -> torch.Tensor:
        flat = torch.empty(shape, dtype=dtype)
        self.register(flat.data_ptr(), flat.nbytes)
        return flat

    def is_pinned(self, host: torch.Tensor) -> bool:
        return any(start <= host.data_ptr() < start + nbytes for start, nbytes in self.registered.items())

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any, piece_bytes: int) -> None:
        assert self.is_pinned(source)
        for there, here in zip(target.split(piece_bytes), source.split(piece_bytes), strict=True):
            self.copies += 1
            with self.gpu.using(stream):
                there.copy_(here, non_blocking=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[DoubleDevice]:
    """In the threads of transformers it would not be there."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(build, "runs_triton", lambda kernel, device: True)
    with DoubleDevice().in_place() as found:
        yield found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether the input embeddings are also the head."""
    found = {}
    for tied in (False, True):
        torch.manual_seed(0)
        config = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": tied})
        found[tied] = tmp_path_factory.mktemp("tied" if tied else "untied")
        LlamaForCausalLM(config).save_pretrained(found[tied])
    return found


@contextmanager
def on(machine: Machine) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "free_bytes", lambda device: machine.free)
        patch.setattr(build, "cuda_pinning", lambda device: Pinning(machine.register, machine.unregister))
        patch.setattr(build, "make_mapping", lambda device: machine.map)
        patch.setattr(build, "BUFFER_BYTES", KEPT_BYTES)
        patch.setattr(
            build, "make_backend", lambda device: CudaBackend(CUDA, machine, piece_bytes=machine.piece_bytes)
        )
        yield


def load(machine: Machine, path: Path, **settings: Any) -> tuple[PreTrainedModel, ResidencyPlan, int]:
    """A model, its plan, and the most bytes while it was loaded."""
    asked = StreamingConfig(max_tokens=TOKENS, **settings)
    machine.gpu.names = {"cuda"}  # there is a "meta" device beside it
    gc.collect()  # models of before
    machine.gpu.most_bytes = machine.gpu.held_bytes
    before = machine.gpu.held_bytes
    with on(machine):
        model = load_streamed(str(path), asked, device=CUDA, attn_implementation="eager").eval()
    machine.gpu.names = {"cuda", "meta"}
    plan = streaming_plan(model)
    assert plan is not None
    return model, plan, machine.gpu.most_bytes - before


IDS = torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def logits(model: PreTrainedModel, device: torch.device) -> list[torch.Tensor]:
    """Of a prompt of all tokens but four, and of these one by one."""
    cache, found = DynamicCache(config=model.config), []
    with torch.no_grad():
        for ids in (IDS[:, :-4], *IDS[:, -4:].split(1, 1)):
            out = model(ids.to(device), past_key_values=cache, use_cache=True, logits_to_keep=1)
            found.append(out.logits.cpu())
    return found


def weights(plan: ResidencyPlan) -> int:
    """Bytes of weights on the device: the plan's, without what a forward takes."""
    sizes = plan.sizes
    return plan.device_bytes - sizes.kv_bytes - sizes.activation_bytes - sizes.workspace_bytes


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "mapped": (True, {}),
    "not asked for": (False, {}),
    "no room to pin": (True, {"pins": TABLE_BYTES}),
    "cannot be read": (True, {"maps": False}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tied", [False, True])
def test_no_moment_takes_more_than_the_plan(
    tied: bool, case: str, gpu: DoubleDevice, checkpoints: dict[bool, Path]
) -> None:
    wanted, given = CASES[case]
    machine = Machine(gpu, **given)
    tables = 1 if tied or case == "mapped" else 2  # on the device; a head is never elsewhere
    budget = BUDGET + (tables - 1) * TABLE_BYTES
    model, plan, loaded = load(machine, checkpoints[tied], vram_budget=budget, host_embeddings=wanted)
    assert plan.host_embeddings is (case == "mapped" and not tied)
    assert len(plan.resident) == 3
    assert loaded == gpu.held_bytes == weights(plan)  # to the byte, and never more
    found = logits(model, CUDA)
    assert gpu.most_bytes <= plan.device_bytes - plan.sizes.workspace_bytes
    assert not gpu.races
    gpu.names = {"cuda"}
    plain = LlamaForCausalLM.from_pretrained(checkpoints[tied]).eval()
    torch.testing.assert_close(found, logits(plain, torch.device("cpu")))


def test_the_control_embeddings_on_the_device_while_loading(
    gpu: DoubleDevice, checkpoints: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was when a run on a GPU took 7% more than its budget."""
    take = build.StreamBuilder._take_embeddings

    def from_the_device(self: build.StreamBuilder, holder: Any) -> None:
        holder.put(holder.get().to(CUDA))
        take(self, holder)

    monkeypatch.setattr(build.StreamBuilder, "_take_embeddings", from_the_device)
    _, plan, loaded = load(Machine(gpu), checkpoints[False], vram_budget=BUDGET)
    slots = plan.n_slots * plan.slot_bytes
    assert loaded == weights(plan) - slots + TABLE_BYTES > weights(plan)


def test_a_plan_is_as_tight_as_it_can_be(gpu: DoubleDevice, checkpoints: dict[bool, Path]) -> None:
    """With the bytes of a layer less, one layer less stays."""
    _, plan, _ = load(Machine(gpu), checkpoints[False], vram_budget=BUDGET)
    room = BUDGET - plan.device_bytes
    assert 0 <= room < plan.slot_bytes
    _, less, _ = load(Machine(gpu), checkpoints[False], vram_budget=BUDGET - room - 1)
    assert len(less.resident) == len(plan.resident) - 1


def test_little_pinned_memory_is_one_warning_and_the_same_answers(
    gpu: DoubleDevice, checkpoints: dict[bool, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """As on WSL2: room for the buffers and for two layers of five, and none for the embeddings."""
    machine = Machine(gpu)
    model, plan, _ = load(machine, checkpoints[False], vram_budget=BUDGET + TABLE_BYTES, host_embeddings=False)
    wanted, layer = logits(model, CUDA), plan.slot_bytes
    machine = Machine(gpu, pins=KEPT_BYTES + 2 * layer)
    with caplog.at_level(logging.WARNING, "kvboost_hf"):
        model, plan, _ = load(machine, checkpoints[False], vram_budget=BUDGET + TABLE_BYTES)
    (record,) = (each for each in caplog.records if each.name.startswith("kvboost_hf"))  # not of transformers
    assert f"{3 * layer / 1e9:.2f} GB of streamed layers are copied through a buffer" in record.getMessage()
    assert "input embeddings that had no room stay on the device" in record.getMessage()
    assert len(plan.in_host) == 5
    assert not plan.host_embeddings
    assert f"The input embeddings, {TABLE_BYTES} bytes, stay on cuda:0" in str(plan)
    torch.testing.assert_close(logits(model, CUDA), wanted, rtol=0, atol=0)
    assert sum(machine.registered.values()) == machine.pins  # the buffers took what was kept for them
    stats = streaming_stats(model)
    assert stats is not None
    assert stats.bytes_copied == stats.layer_calls * layer + 2 * layer  # and those for the next token


@pytest.mark.parametrize("pieces", [1, 3])
def test_copies_of_whole_layers_and_of_pieces(pieces: int, gpu: DoubleDevice, checkpoints: dict[bool, Path]) -> None:
    machine = Machine(gpu)
    layer = load(machine, checkpoints[False], keep_first_k=3)[1].slot_bytes
    machine.piece_bytes = -(-layer // pieces)
    model, _, _ = load(machine, checkpoints[False], keep_first_k=3)
    machine.copies = 0
    logits(model, CUDA)
    stats = streaming_stats(model)
    assert stats is not None
    assert machine.copies == pieces * stats.bytes_copied // layer == pieces * (5 * 5 + 2)


@pytest.mark.slow
def test_other_programs_take_room_of_the_card(
    gpu: DoubleDevice, checkpoints: dict[bool, Path], caplog: pytest.LogCaptureFixture
) -> None:
    whole = Machine(gpu, free=BUDGET)
    _, plan, _ = load(whole, checkpoints[False], vram_budget=BUDGET)
    shared = Machine(gpu, free=BUDGET * 10 // 9 - 3 * plan.slot_bytes // 2)
    with caplog.at_level(logging.WARNING, "kvboost_hf"):
        _, less, _ = load(shared, checkpoints[False], vram_budget=10 * BUDGET)
    assert f"only {shared.free} are free on the device" in caplog.text
    assert less.device_bytes <= 0.9 * shared.free
    assert 0 < len(less.resident) < len(plan.resident)
    shared.free = 35_000_000
    with pytest.raises(ValueError, match=r"at least (\d+) bytes .* close other programs") as told:
        load(shared, checkpoints[False], vram_budget=10 * BUDGET)
    least = int(str(told.value).split("at least ")[1].split()[0])
    assert load(whole, checkpoints[False], vram_budget=least)[1].resident == ()
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        load(whole, checkpoints[False], vram_budget=least - 1)
