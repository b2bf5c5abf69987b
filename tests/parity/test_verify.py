"""`verify_correctness` on real models, and that it notices K/V that is wrong."""

import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.turboquant.sabotage import Damage, sabotaged
from kvboost_hf import ChunkStore, ReusePolicy, attach, detach, verify_correctness
from kvboost_hf.assets import load_embedded
from kvboost_hf.config import KVQuantConfig, Repair
from tests.architectures.models import make_architecture
from tests.conftest import counted, make_model, random_ids
from tests.internals.assets import encode
from tests.internals.cache import ContentChunker
from tests.internals.prompts import linked_documents, shuffled_documents
from tests.internals.verify import CorrectnessReport


class Zeroed(ChunkStore):
    """Loses what it stores."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        put = self.put

        def spoiled(*args: Any, **kwargs: Any) -> Any:
            found = put(*args, **kwargs)
            for chunk in self.inspect().chunks.values():
                self.spoil(chunk.kv.tensors)
            return found

        self.put = spoiled

    @staticmethod
    def spoil(blocks: tuple[torch.Tensor, ...]) -> None:
        for block in blocks:
            block.zero_()


class Shuffled(Zeroed):
    """Gives each token the values of another; values and keys moved together would still be a right answer."""

    @staticmethod
    def spoil(blocks: tuple[torch.Tensor, ...]) -> None:
        for block in blocks:
            block[1::2] = block[1::2].roll(7, dims=-2)


def prompts(num_prompts: int = 3) -> list[list[int]]:
    """Documents in other orders, and the first prompt again."""
    _, tokenizer = load_embedded()
    asked = shuffled_documents(tokenizer, 500, num_prompts, seed=3)
    ids = [encode(tokenizer, [{"role": "user", "content": question.text}]) for question in asked]
    return [*ids, ids[0]]


def test_exact_reuse_is_right() -> None:
    model, _ = load_embedded()
    ids = prompts()
    with counted(model) as work:
        report = verify_correctness(model, ids, policies=[], max_new_tokens=12)
    full, exact, naive = report.arms
    assert report
    assert (full.name, exact.name, naive.name) == ("full", "exact", "naive")
    assert exact.diverged == 0
    assert exact.agreement == 1
    assert exact.max_kl < 1e-6
    assert report.exact.prompts[-1].reused_tokens >= len(ids[0]) - 128
    decoded = sum(len(prompt.kl) - 1 for arm in (full, exact) for prompt in arm.prompts)
    forwarded = full.forwarded_tokens + exact.forwarded_tokens + naive.forwarded_tokens
    assert full.forwarded_tokens == sum(map(len, ids))
    assert work.tokens >= forwarded + decoded  # what the report says was computed was


@pytest.mark.parametrize("store", [Zeroed, Shuffled])
def test_wrong_kv_is_noticed(store: type[ChunkStore]) -> None:
    model, _ = load_embedded()
    report = verify_correctness(model, prompts(), policies=[], max_new_tokens=12, make_store=store)
    assert not report
    assert report.recommended == ReusePolicy()
    assert "WRONG" in report.verdict
    assert "Do not use it" in str(report)
    assert report.exact.mean_kl > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    model = make_model("llama").to(dtype)
    shared = random_ids(64, seed=9)
    ids = [torch.cat([shared, random_ids(20, seed=seed)], dim=1) for seed in range(12)]

    def verify(store: type[ChunkStore]) -> CorrectnessReport:
        make_store = lambda model: store(model, chunk_size=32)  # noqa: E731
        return verify_correctness(model, ids, policies=[], max_new_tokens=4, make_store=make_store)

    assert verify(ChunkStore), verify(ChunkStore).verdict
    # The live cache serves what two prompts in a row share: only what it cannot hold comes from the store.
    ids = [*ids[:2], random_ids(90, seed=5), *ids[2:]]
    assert not verify(Zeroed)


def test_a_model_that_nothing_is_reused_for() -> None:
    model = make_model("gpt2")
    report = verify_correctness(model, [random_ids(64)] * 2, max_new_tokens=2)
    assert report
    assert report.recommended == ReusePolicy()
    assert [arm.name for arm in report.arms] == ["full", "exact", "naive"]  # nothing can be moved: no repairs
    assert json.loads(json.dumps(report.as_dict())) == report.as_dict()


def blend(repair: Repair, ratio: float = 0.15) -> ReusePolicy:
    return ReusePolicy(mode="blend", repair=repair, recompute_ratio=ratio, progressive=False)


@pytest.mark.slow
def test_moved_documents_that_need_others() -> None:
    """Naive reuse must get them wrong, a repair right, and computing all again must give the plain logits."""
    model, tokenizer = load_embedded()
    chunker = ContentChunker.for_tokenizer(tokenizer)
    asked = linked_documents(tokenizer, 600, 10, seed=1)
    ids = [encode(tokenizer, [{"role": "user", "content": question.text}]) for question in asked]
    report = verify_correctness(
        model,
        ids,
        policies=[blend("query"), blend("first_k"), blend("cacheblend"), blend("query", 1.0)],
        max_new_tokens=10,
        make_store=lambda model: ChunkStore(model, chunker=chunker),
    )
    _, exact, naive, *repaired, whole = report.arms
    assert report
    assert not naive.meets(report.max_kl, report.min_agreement)
    assert naive.diverged >= 1
    for arm in repaired:
        assert arm.mean_kl < naive.mean_kl / 20
        assert arm.meets(report.max_kl, report.min_agreement)
        assert arm.moved_tokens == naive.moved_tokens
        assert naive.forwarded_tokens < arm.forwarded_tokens < 0.8 * exact.forwarded_tokens
    assert whole.max_kl < 1e-6
    assert report.recommended_arm in repaired
    assert report.recommended.mode == "blend"


def test_documents_are_warmed() -> None:
    model, tokenizer = load_embedded()
    asked = shuffled_documents(tokenizer, 500, 2, seed=3)
    ids = [encode(tokenizer, [{"role": "user", "content": question.text}]) for question in asked]
    documents = asked[0].text.split("\n\n")[:-1]
    report = verify_correctness(
        model,
        ids,
        tokenizer=tokenizer,
        documents=documents,
        policies=[blend("first_k")],
        max_new_tokens=8,
        make_store=lambda model: ChunkStore(model, chunker=ContentChunker.for_tokenizer(tokenizer)),
    )
    assert report
    *_, in_context, alone = report.arms
    assert in_context.prompts[0].moved_tokens == 0  # never seen before
    assert alone.prompts[0].moved_tokens > 0.7 * len(ids[0])  # but warmed
    once = "first_k 15%, once"
    names = ["full", "exact", "naive", "naive, warmed", once, f"{once}, warmed"]
    assert [arm.name for arm in report.arms] == names


def test_codecs_are_read_back_from_the_store() -> None:
    """The same prompt again and again: a live cache has it, and says nothing of a codec."""
    model, _ = load_embedded()
    ids = [prompts(1)[0]] * 3
    live = KVQuantConfig(window=32)
    report = verify_correctness(model, ids, codecs=["int8", "int2"], live_quants=[live], max_new_tokens=6)
    assert report.exact.max_kl < 1e-6
    int8, int2, held, *both = report.coded
    assert [arm.name for arm in (int8, held, *both)] == [
        "int8",
        "live turboquant:4",
        "int8, live turboquant:4",
        "int2, live turboquant:4",
    ]
    tokens = 3 * len(ids[0])
    for arm in (int8, int2):
        assert arm.coded_tokens == tokens - 3  # all but the last token of each
        assert arm.forwarded_tokens == 3
    assert 0.8 * tokens < held.coded_tokens < tokens - 3  # the last ones stay exact
    assert 1e-10 < int8.mean_kl < 1e-4 < int2.mean_kl
    assert 1e-10 < held.mean_kl < 0.1
    assert report.passes(int8)
    assert "int8 is within the thresholds" in report.verdict


@pytest.mark.parametrize("damage", ["zeroed", "another seed"])
def test_a_broken_codec_is_noticed(damage: Damage) -> None:
    model, _ = load_embedded()

    def store(model: PreTrainedModel) -> ChunkStore:
        made = ChunkStore(model)
        made.codec = sabotaged(KVQuantConfig(), damage)
        return made

    report = verify_correctness(model, prompts(2), policies=[], max_new_tokens=4, make_store=store)
    assert not report
    assert not report.wrong  # that is for K/V as it is, which is not damaged
    (arm,) = report.coded
    assert arm.mean_kl > 1
    assert "NOT within the thresholds" in report.verdict


def test_no_verdict_without_codes(llama: PreTrainedModel) -> None:
    report = verify_correctness(llama, [random_ids(60)], live_quants=[KVQuantConfig()], max_new_tokens=2)
    assert not report
    assert "live turboquant:4: NO VERDICT" in report.verdict
    # Of a model that keeps no keys and values, states are read from the store; no codec has seen them.
    report = verify_correctness(make_architecture("mamba2"), [random_ids(150)], codecs=["int8"], max_new_tokens=2)
    assert report.coded[0].reused_tokens == 128
    assert not report
    assert "int8: NO VERDICT" in report.verdict


def test_progress_counts_every_call(llama: PreTrainedModel) -> None:
    seen: list[tuple[int, int]] = []
    ids = [random_ids(20, seed=seed)[0].tolist() for seed in range(2)]
    progress = lambda *at: seen.append(at)  # noqa: E731
    verify_correctness(llama, ids, policies=[blend("first_k")], codecs=["int8"], max_new_tokens=2, progress=progress)
    assert seen == [(at, 10) for at in range(1, 11)]


def test_bad_input(llama: PreTrainedModel) -> None:
    ids = [random_ids(8)]
    for bad, message in (
        ([], "at least one prompt, got none"),
        ("text", "list of prompts, got 'text'"),
        (7, "list of prompts, got 7"),
        (["text"], "`tokenizer=tokenizer`"),
        ([[]], "n > 0, got"),
        ([[1.5]], "text or token ids, got .1.5."),
        ([random_ids(8, batch=2)], r"got a tensor \[2, 8\]"),
        ([torch.rand(3)], "float32"),
    ):
        with pytest.raises(ValueError, match=message):
            verify_correctness(llama, bad)  # type: ignore[arg-type]
    for bad_arguments, message in (
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1, got 0"),
        ({"max_new_tokens": 1.5}, "must be an int, got 1.5"),
        ({"max_kl": -1}, "`max_kl` must be at least 0, got -1"),
        ({"min_agreement": 2}, "from 0 to 1, got 2"),
        ({"policies": [ReusePolicy()]}, "mode 'blend', got ReusePolicy"),
        ({"codecs": ["raw"]}, "`codecs` must be lossy, got 'raw'"),
        ({"codecs": ["int3"]}, "A codec must be .* got 'int3'"),
        ({"live_quants": ["raw"]}, "`live_quants` must be lossy, got 'raw'"),
    ):
        with pytest.raises(ValueError, match=message):
            verify_correctness(llama, ids, **bad_arguments)
    with pytest.raises(ValueError, match="eval mode"):
        verify_correctness(llama.train(), ids)
    with pytest.raises(ValueError, match="detach"):
        verify_correctness(attach(llama.eval()), ids)
    assert verify_correctness(detach(llama), ids, max_new_tokens=1)
