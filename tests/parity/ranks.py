"""One rank of a model that several processes compute; `test_ranks.py` starts as many. Each case is a function.

    python -m tests.parity.ranks FOLDER CASE ...

A case raises where something is wrong. All ranks run the same case, and those that make ranks differ do so by `rank`.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    RankError,
    ReusePolicy,
    StoreClosedError,
    TreeDecoding,
    attach,
    detach,
    load_assistant,
    lookup_assistant,
    score_ids,
)

CHUNK = 16


class Rank:
    """The model, its plain answers, and stores of this rank.

    Args:
        folder: Shared by all ranks; the model is in `model`.
    """

    def __init__(self, folder: Path) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder = folder
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()
        self.alone: Any = AutoModelForCausalLM.from_pretrained(folder / "model").eval()

    def store(self, **more: Any) -> ChunkStore:
        return ChunkStore(self.model, chunk_size=CHUNK, **more)

    def wait(self) -> None:
        distributed.barrier()

    def same(self, value: Any) -> bool:
        """Whether a value is the same at all ranks."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return all(each == found[0] for each in found)

    def ask(self, cache: ChunkReuseCache | None, ids: torch.Tensor, **more: Any) -> int:
        """Answer a prompt, compare with one process without reuse, and return how many tokens were forwarded."""
        told = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True} | more
        if "attention_mask" not in told:
            told["attention_mask"] = torch.ones_like(ids)
        wanted = self.alone.generate(ids, **{key: told[key] for key in told if key != "prefill_chunk_size"})
        got = self.model.generate(ids, **({"past_key_values": cache} if cache is not None else {}), **told)
        assert torch.equal(wanted.sequences, got.sequences)
        for ours, theirs in zip(got.logits, wanted.logits, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4)
        if cache is None:
            return ids.numel()
        report = cache.report
        assert report.bypass_reason is None, report.bypass_reason
        forwarded = int(report.forwarded_tokens)
        assert self.same((forwarded, report.reused_tokens)), "ranks must forward the same tokens"
        return forwarded


def ids_of(length: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randint(8, 400, (rows, length), generator=torch.Generator().manual_seed(seed))


def reuse(rank: Rank) -> None:
    """Host memory, a new cache each time; then the kept cache of a chat."""
    store = rank.store()
    assert [rank.ask(ChunkReuseCache(rank.model, store), ids_of(100)) for _ in range(2)] == [100, 4]
    kept = ChunkReuseCache(rank.model, store)
    text = ids_of(60, 5)
    for turn in range(3):
        forwarded = rank.ask(kept, text)
        assert forwarded == (60 if not turn else 11), forwarded
        text = torch.cat([text, ids_of(11, 50 + turn)], 1)


def cleared(rank: Rank) -> None:
    """One rank clears its store: what it lacks, no rank uses."""
    for who in range(rank.size):
        store = rank.store()
        rank.ask(ChunkReuseCache(rank.model, store), ids_of(100))
        if rank.rank == who:
            store.clear()
        assert rank.ask(ChunkReuseCache(rank.model, store), ids_of(100)) == 100
        assert rank.ask(ChunkReuseCache(rank.model, store), ids_of(100)) == 4


def small(rank: Rank) -> None:
    """One rank has room for few chunks."""
    room = 4 * 2 * 3 * 16 * 16 * 4 if rank.rank else 2**30
    store = rank.store(max_bytes=room)
    total = 0
    for turn in range(12):
        total += rank.ask(ChunkReuseCache(rank.model, store), ids_of(80, turn % 3))
    assert total <= 12 * 80
    assert rank.ask(ChunkReuseCache(rank.model, store), ids_of(80, 2)) <= 80


def reset(rank: Rank) -> None:
    """One rank's live cache is empty."""
    store = rank.store()
    kept = ChunkReuseCache(rank.model, store)
    rank.ask(kept, ids_of(90, 1))
    if not rank.rank:
        kept.reset()
        store.clear()
    assert rank.ask(kept, ids_of(90, 1)) == 90
    assert rank.ask(kept, ids_of(90, 1)) == 1


def tiers(rank: Rank) -> None:
    """A folder, or a server, that all ranks share; opened anew; blobs lost and damaged at one rank."""
    place = os.environ.get("RANKS_TIER") or f"disk:{rank.folder / 'tier'}:1GB"
    lower = [place]
    for turn in range(2):
        with rank.store(tiers=lower) as store:
            forwarded = rank.ask(ChunkReuseCache(rank.model, store), ids_of(100, 7))
            assert forwarded == (4 if turn else 100), forwarded
            store.flush()
            rank.wait()
    for harm in range(3):
        with rank.store(tiers=lower) as store:
            rank.ask(ChunkReuseCache(rank.model, store), ids_of(40, 99))  # so that it knows its root
            own = [each for each in store.entries() if each.root in store._records.lower._durable_roots]
            second = next(each for each in own if each.start == 16 and len(each.tokens) == 16 and _of(each, 7))
            if rank.rank == harm % rank.size:
                lower_tier = store._records.lower.tiers.tiers[0].tier
                if harm == 2 and "disk" in place:
                    (path,) = (rank.folder / "tier").rglob(f"{second.key.hex()}.safetensors")
                    data = bytearray(path.read_bytes())
                    data[-3] ^= 1
                    path.write_bytes(data)
                else:
                    lower_tier.delete([second.key])
            rank.wait()
            forwarded = rank.ask(ChunkReuseCache(rank.model, store), ids_of(100, 7))
            assert forwarded == 84, forwarded
            store.flush()
            rank.wait()
        with rank.store(tiers=lower) as store:
            assert rank.ask(ChunkReuseCache(rank.model, store), ids_of(100, 7)) == 4
        rank.wait()


def _of(entry: Any, seed: int) -> bool:
    return list(entry.tokens) == ids_of(100, seed)[0, entry.start : entry.start + len(entry.tokens)].tolist()


def batches(rank: Rank) -> None:
    """Padding, rows that differ, beams, and one rank that lacks what a row begins with."""
    store, twin = (
        rank.store(),
        ChunkStore(rank.alone, chunk_size=CHUNK),
    )  # one process, which lacks what any rank lacks
    every = ReusePolicy(min_prefill_saving=0)
    rows = ids_of(70, 3, rows=3)
    mask = torch.ones_like(rows)
    for row, pad in enumerate((0, 9, 23)):
        mask[row, :pad] = 0
        rows[row, :pad] = 0
    for turn in range(3):
        if turn == 2:
            for which in (twin, store)[: 1 + rank.rank]:
                doomed = [each.key for each in which.held() if list(each.tokens[:4]) == rows[1, 9:13].tolist()]
                which.quarantine(doomed)
                assert doomed
        alone = ChunkReuseCache(rank.alone, twin, policy=every)
        rank.alone.generate(rows, attention_mask=mask, past_key_values=alone, max_new_tokens=6, do_sample=False)
        forwarded = rank.ask(ChunkReuseCache(rank.model, store, policy=every), rows, attention_mask=mask)
        assert forwarded == alone.report.forwarded_tokens
        assert forwarded == 178 if not turn else forwarded < 178
    for _ in range(2):
        rank.ask(ChunkReuseCache(rank.model, store), ids_of(50, 4), num_beams=3)
    shared = torch.cat([ids_of(48, 8).expand(4, -1), ids_of(9, 9, rows=4)], 1)
    assert rank.ask(ChunkReuseCache(rank.model, store), shared) < shared.numel()


def pieces(rank: Rank) -> None:
    """`prefill_chunk_size`, with a store that one rank has cleared."""
    store = rank.store()
    rank.ask(ChunkReuseCache(rank.model, store), ids_of(100, 2), prefill_chunk_size=32)
    assert rank.ask(ChunkReuseCache(rank.model, store), ids_of(100, 2), prefill_chunk_size=32) < 40
    if rank.rank:
        store.clear()
    rank.ask(ChunkReuseCache(rank.model, store), ids_of(100, 2), prefill_chunk_size=32)


def attached(rank: Rank) -> None:
    store = rank.store()
    attach(rank.model, store)
    try:
        for turn in range(4):
            if turn == 2 and not rank.rank:
                store.clear()
            rank.ask(None, ids_of(100, 2))
        assert store.stats()["hits"] >= 6
    finally:
        detach(rank.model)


def codecs(rank: Rank) -> None:
    """Lossy stores, codes in live caches, and hidden states: the same tokens at all ranks, and one lacks K/V."""
    for more, settings in (
        ({"codec": "int8"}, {}),
        ({}, {"live_quant": "int8"}),
        ({}, {"policy": ReusePolicy(keep_logprobs=True)}),
        ({}, {"policy": ReusePolicy(reproducible=True)}),
    ):
        store = rank.store(**more)
        for turn in range(3):
            if turn == 2 and rank.rank:
                store.clear()
            cache = ChunkReuseCache(rank.model, store, **settings)
            out = rank.model.generate(ids_of(300, 6), past_key_values=cache, max_new_tokens=6, do_sample=False)
            assert rank.same((out.tolist(), cache.report.forwarded_tokens))
            assert cache.report.forwarded_tokens <= (300 if turn != 1 else 60), (more, settings, turn)


def scores(rank: Rank) -> None:
    """`score_ids`, with a store that one rank has cleared; and `warm`."""
    pairs = [(ids_of(50, 1)[0].tolist(), ids_of(4, n)[0].tolist()) for n in range(6)]
    wanted = [each.logprob for each in score_ids(rank.alone, pairs)]
    store = rank.store()
    for turn in range(3):
        if turn == 2 and rank.rank:
            store.clear()
        found = score_ids(rank.model, pairs, cache=ChunkReuseCache(rank.model, store))
        assert [each.logprob for each in found] == pytest.approx(wanted, abs=1e-3)
    for _ in range(2):
        store.warm(ids_of(64, 70)[0].tolist())
        if rank.rank:
            store.clear()
    rank.ask(ChunkReuseCache(rank.model, store), ids_of(64, 70))


def closed(rank: Rank) -> None:
    """A rank whose store is closed raises its error, and all others one that tells of it; then all go on."""
    store = rank.store()
    rank.ask(ChunkReuseCache(rank.model, store), ids_of(100, 2))
    caches = [ChunkReuseCache(rank.model, store) for _ in range(2)]
    if rank.rank == 1:
        store.close()
    expected = StoreClosedError if rank.rank == 1 else RankError
    with pytest.raises(expected, match="was closed" if rank.rank == 1 else "Another of the"):
        rank.model.generate(ids_of(100, 2), past_key_values=caches[0], max_new_tokens=2)
    assert rank.ask(ChunkReuseCache(rank.model, rank.store()), ids_of(100, 2)) == 100


def refused(rank: Rank) -> None:
    """What ranks cannot agree on is refused with the reason, by each of them."""
    from tests.internals.server import ModelEngine

    store = rank.store()
    attempts: list[Callable[[], Any]] = [
        lambda: ChunkReuseCache(rank.model, store, policy=ReusePolicy(mode="blend")),
        lambda: ChunkReuseCache(rank.model, store, policy=ReusePolicy(audit_rate=0.5)),
        lambda: load_assistant(rank.alone, target=rank.model),
        lambda: lookup_assistant(rank.model, store),
        lambda: rank.model.generate(ids_of(20), custom_generate=TreeDecoding(rank.alone), max_new_tokens=2),
        lambda: store.check_integrity(),
        lambda: ModelEngine(rank.model, None, store=store),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError, match=r"ranks compute \(tp_plan\)"):
            attempt()


def storm(rank: Rank) -> None:
    """Prompts of many kinds, while ranks at random clear, quarantine, reset, and have small stores; seeded by rank."""
    own = torch.Generator().manual_seed(rank.rank)
    both = torch.Generator().manual_seed(1234)
    store = rank.store(max_bytes=2**17 * (1 + rank.rank), tiers=[f"disk:{rank.folder / f'storm{rank.rank}'}:1MB"])
    kept = ChunkReuseCache(rank.model, store)
    reused = 0

    def draw(among: int, generator: torch.Generator) -> int:
        return int(torch.randint(among, (1,), generator=generator))

    for _ in range(40):
        match draw(8 * rank.size, own):
            case 0:
                store.clear()
            case 1:
                store.quarantine([each.key for each in store.held()[:2]])
            case 2:
                kept.reset()
            case 3:
                store.flush()
        text = torch.cat([ids_of(16 * draw(5, both), draw(3, both)), ids_of(1 + draw(60, both), draw(4, both))], 1)
        cache = kept if draw(2, both) else ChunkReuseCache(rank.model, store)
        forwarded = rank.ask(cache, text, max_new_tokens=1 + draw(4, both))
        reused += text.shape[1] - forwarded
    assert reused > 300, reused


def killed(rank: Rank) -> None:
    """The last rank ends without a word: the others' call raises, and what they have stored is right."""
    store = rank.store(tiers=[f"disk:{rank.folder / 'killed'}:1GB"])
    rank.ask(ChunkReuseCache(rank.model, store), ids_of(100, 2))
    store.flush()
    rank.wait()
    if rank.rank == rank.size - 1:
        os._exit(9)
    time.sleep(0.5)
    cache = ChunkReuseCache(rank.model, store)
    begin = time.monotonic()
    with pytest.raises(RankError, match="ended"):
        rank.model.generate(ids_of(100, 2), past_key_values=cache, max_new_tokens=2)
    assert time.monotonic() - begin < 20
    held = {each.key for each in store.held()}
    assert len(held) == 6
    store.close()
    (rank.folder / f"survived-{rank.rank}").touch()
    os._exit(0)  # the group cannot be left in order


_ALL = (reuse, cleared, small, reset, tiers, batches, pieces, attached, codecs, scores, closed, refused, storm, killed)
CASES: dict[str, Callable[[Rank], None]] = {case.__name__: case for case in _ALL}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = Rank(folder)
    for name in names:
        CASES[name](rank)
        rank.wait()
        if not rank.rank:
            (folder / f"right-{name}").touch()
    distributed.destroy_process_group()


def save_model(folder: Path) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=500,
        max_position_embeddings=1024,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


if __name__ == "__main__":
    main()
