"""States that are saved in the middle of a forward, and what else runs the same modules meanwhile."""

import gc
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility
from tests.architectures.models import make_architecture
from tests.conftest import as_inputs, random_ids
from tests.internals.cache import Checkpoints, Kind, _short_chunks
from tests.internals.disk import DiskTier

FAMILIES = ["qwen3_next", "falcon_h1", "mamba2", "lfm2", "kimi_linear", "nemotron_h", "olmo_hybrid", "bamba"]
NEW = 4


class Rows(TorchFunctionMode):
    """Counts calls with rows, and the rows, of each weight that `linear` is given."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.rows: Counter[int] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear and args[0].numel():
            self.calls[id(args[1])] += 1
            self.rows[id(args[1])] += args[0].shape[1]
        return function(*args, **kwargs or {})


def make(name: str) -> PreTrainedModel:
    model = make_architecture(name)
    check_model_compatibility(model)
    return model


def answer(model: PreTrainedModel, ids: torch.Tensor, cache: ChunkReuseCache | None = None) -> Any:
    reuse = {} if cache is None else {"past_key_values": cache}
    return model.generate(
        **as_inputs(ids),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **reuse,
    )


def check(model: PreTrainedModel, ids: torch.Tensor, cache: ChunkReuseCache) -> None:
    plain, reused = answer(model, ids), answer(model, ids, cache)
    assert torch.equal(plain.sequences, reused.sequences)
    # Plain forwards over two parts of a prompt differ from one over both by 2e-4 here; a lost state, by 0.1 or more.
    for expected, found in zip(plain.logits, reused.logits, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_column_is_projected_twice(name: str) -> None:
    """Projections of a cold prompt have the rows of plain generate(), most of them in as many calls."""
    model, ids = make(name), random_ids(700, seed=1)
    with Rows() as plain:
        answer(model, ids)
    store = ChunkStore(model)
    with Rows() as reused:
        answer(model, ids, ChunkReuseCache(model, store))
    assert store.stats()["states"] >= 10
    assert reused.rows == plain.rows
    assert sum(reused.calls.values()) >= sum(plain.calls.values())
    if name == "qwen3_next":  # its mixers project the hidden states as they are: one call, and at the end one more
        mixers = sum(hasattr(layer, "linear_attn") for layer in model.model.layers)
        assert sum(reused.calls.values()) == sum(plain.calls.values()) + mixers


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 200])
def test_lengths_around_the_border_of_a_segment(name: str, length: int) -> None:
    model = make(name)
    store = ChunkStore(model, chunk_size=16)
    ids = random_ids(length + 70, seed=12)
    check(model, ids[:, :length], ChunkReuseCache(model, store))
    check(model, ids, ChunkReuseCache(model, store))
    assert store.check_integrity().wrong == 0


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_rows(name: str) -> None:
    """Projections of several rows are cut from one tensor."""
    model = make(name)
    store = ChunkStore(model, chunk_size=16)
    for seed in (3, 4):
        ids = torch.cat([random_ids(150, seed=2, batch=1).expand(3, -1), random_ids(60, seed=seed, batch=3)], dim=1)
        check(model, ids, ChunkReuseCache(model, store))


@torch.no_grad()
def test_arguments_of_no_column_reach_a_mixer_as_they_are() -> None:
    model, ids = make("falcon_h1"), random_ids(150, seed=1)
    more = {"cache_position": torch.arange(150), "num_items_in_batch": torch.tensor(3)}
    expected = model(ids, logits_to_keep=1, **more).logits
    store = ChunkStore(model, chunk_size=16)
    found = model(ids, past_key_values=ChunkReuseCache(model, store), logits_to_keep=1, **more).logits
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    assert store.stats()["states"] > 1


@pytest.mark.parametrize("part", ["out_proj", "in_proj_qkvz", "norm"])
def test_a_hook_within_a_mixer_sees_all_columns(part: str) -> None:
    model, ids = make("qwen3_next"), random_ids(300, seed=5)
    mixer = next(layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn"))
    seen: list[int] = []
    getattr(mixer, part).register_forward_hook(lambda module, args, output: seen.append(output.numel()))
    plain = answer(model, ids)
    expected, seen[:] = list(seen), []
    reused = answer(model, ids, ChunkReuseCache(model, ChunkStore(model)))
    assert torch.equal(plain.sequences, reused.sequences)
    assert max(seen) >= max(expected) * 0.8  # the last border of a chunk is where another forward begins
    assert len(seen) <= len(expected) + 1


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2"])
def test_threads_run_the_same_modules(name: str) -> None:
    """Plain calls and calls with caches at the same time answer as each alone."""
    model = make(name)
    prompts = [random_ids(300 + 7 * i, seed=20 + i) for i in range(4)]
    expected = [answer(model, ids) for ids in prompts]
    wrong: list[str] = []

    def run(number: int) -> None:
        for turn in range(6):
            cache = ChunkReuseCache(model, ChunkStore(model)) if (number + turn) % 2 else None
            found = answer(model, prompts[number], cache)
            close = all(
                torch.allclose(a, b, atol=2e-4, rtol=2e-4)
                for a, b in zip(found.logits, expected[number].logits, strict=True)
            )
            if not close or not torch.equal(found.sequences, expected[number].sequences):
                wrong.append(f"thread {number}, turn {turn}, {'reused' if cache is not None else 'plain'}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("columns", [64, 236])  # of the first segment, and of the others
@pytest.mark.parametrize("goes_on", [True, False])
def test_an_error_within_a_segment_leaves_no_hook(
    error: type[BaseException], columns: int, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make("qwen3_next"), random_ids(300, seed=6)
    mixer = next(layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn"))
    cache = ChunkReuseCache(model, ChunkStore(model))
    project = nn.functional.linear

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        if args[1] is mixer.out_proj.weight and args[0].shape[1] == columns:
            raise error("stop")
        return project(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(nn.functional, "linear", failing)
        with pytest.raises(error, match="stop"):
            answer(model, ids, cache)
    given = torch.randn(1, 3, mixer.out_proj.in_features)
    torch.testing.assert_close(mixer.out_proj(given), project(given, mixer.out_proj.weight), atol=0, rtol=0)
    if goes_on:
        check(model, ids, cache)
    else:
        del cache
        gc.collect()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in mixer.modules())
    check(model, ids, ChunkReuseCache(model, ChunkStore(model)))


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_over_a_thousand_sessions() -> None:
    """Sessions of two turns behind a shared head: the budgets hold, the head stays, and nothing else grows."""
    model = make("qwen3_next")
    probe = ChunkStore(model)
    answer(model, random_ids(300, seed=1), ChunkReuseCache(model, probe))
    size = next(iter(probe.inspect().states.values())).nbytes
    store = ChunkStore(model, max_bytes=60 * size, state_share=0.5)
    head, early = random_ids(200, seed=1), 0
    for number in range(1000):
        cache = ChunkReuseCache(model, store)
        first = torch.cat([head, random_ids(40, seed=100 + number)], dim=1)
        found = answer(model, first, cache).sequences
        assert number == 0 or cache.report.prompt_tokens - cache.report.reused_tokens <= 40 + 64
        answer(model, torch.cat([found, random_ids(9, seed=2)], dim=1), cache)
        assert cache.report.reused_tokens >= first.shape[1]
        kept = store.inspect()
        assert store.stats()["bytes"] <= store.max_bytes
        assert sum(each.nbytes for each in kept.states.values()) <= store.max_bytes // 2
        if number == 300:
            gc.collect()
            early = rss()
    gc.collect()
    assert rss() - early < 8 * 2**20
    store.check_consistency()
    assert store.check_integrity(0.3).wrong == 0


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("own", [12, 130])
def test_a_second_sharer_wherever_the_head_ends(name: str, own: int) -> None:
    """The tail of the first prompt, which fills no chunk, holds states, too."""
    model = make(name)
    for head in range(70, 400, 37):
        store = ChunkStore(model)
        first, second = (
            torch.cat([random_ids(head, seed=3), random_ids(own, seed=seed)], dim=1) for seed in (head, head + 1)
        )
        answer(model, first, ChunkReuseCache(model, store))
        cache = ChunkReuseCache(model, store)
        check(model, second, cache)
        assert cache.report.forwarded_tokens <= own + 64, f"a head of {head} tokens"


@pytest.mark.daily
@pytest.mark.parametrize(
    ("size", "device", "within"),
    [(256, "cpu", 64), (64, "cpu", 64), (16, "cpu", 16), (256, "meta", 256), (None, "cpu", None)],
)
def test_segments_are_padded_to_short_chunks_on_a_cpu(size: int | None, device: str, within: int | None) -> None:
    """Else each of them would cost as much as a whole one of 256 tokens."""
    mixer = nn.Module()
    mixer.chunk_size = size  # type: ignore[assignment]
    with _short_chunks(mixer, torch.device(device)):
        assert mixer.chunk_size == within
    assert mixer.chunk_size == size


@pytest.mark.daily
@pytest.mark.parametrize(
    ("room", "cuts"),
    [
        (0, [10, 70]),  # where states must be kept
        (299, [10, 70]),
        (300, [10, 40, 70]),
        (400, [10, 30, 50, 70]),
        (600, [10, 20, 30, 50, 60, 70]),
        (700, [10, 20, 30, 40, 50, 60, 70]),
        (10**6, [10, 20, 30, 40, 50, 60, 70]),
    ],
)
def test_states_are_left_out_evenly(room: int, cuts: list[int]) -> None:
    checkpoints = Checkpoints({}, [], 0, 100, [10, 70], [20, 30, 40, 50, 60], room)
    checkpoints._choose(100)
    assert checkpoints._cuts == cuts


def test_few_states_of_a_long_prompt_are_written_to_tiers(tmp_path: Path) -> None:
    """They are large: host memory has them every 64 tokens, and lower tiers every 512, and where the prompt ends."""
    model, ids = make("qwen3_next"), random_ids(1600, seed=2)
    with ChunkStore(model, tiers=["ram:1GB", f"disk:{tmp_path}:1GB"]) as store:
        answer(model, ids, ChunkReuseCache(model, store))
        assert store.stats()["states"] >= 24
    found = DiskTier(tmp_path, max_bytes=2**30)
    written = [each for each in found.entries() if each.kind is Kind.STATES]
    found.close()
    assert 3 <= len(written) <= 5
