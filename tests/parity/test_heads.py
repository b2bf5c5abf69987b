"""The contract of heads that draft, for every kind: warm as cold, and answers as without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvboost_hf import ChunkReuseCache, ChunkStore, TreeDecoding, attach, detach, last_cache
from kvboost_hf.assets import load_embedded
from tests.conftest import random_ids
from tests.heads import GREEDY, KINDS, NEW, PROMPT, Pair, drafted, make_pair
from tests.internals.cache import GrowingTensor, HeadKV, HiddenStates

HOWS = ("chains", "trees")


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(kind: str, tmp_path: Path) -> Pair:
    made = make_pair(kind, tmp_path)
    for how in HOWS:  # the model is tried once
        drafted(made, random_ids(20), how, cache=ChunkReuseCache(made.model), max_new_tokens=3)
    return made


@pytest.mark.parametrize("how", HOWS)
def test_warm_is_as_cold(how: str, kind: str, pair: Pair) -> None:
    """The tokens of plain generate(), the drafts of no cache, and the columns of what is new alone."""
    model, _ = pair
    store, behind = ChunkStore(model, chunk_size=32), KINDS[kind]
    longer, parted = torch.cat([PROMPT, random_ids(40, seed=9)], 1), torch.cat([PROMPT[:, :77], random_ids(60)], 1)
    kept, counts = ChunkReuseCache(model, store), list[tuple[int, int]]()
    for prompt, known, cache in (
        (PROMPT, 0, None),
        (PROMPT, 150, None),
        (longer, 150, None),
        (PROMPT[:, :97], 96, kept),
        (parted, 77, kept),
        (parted, 137, "attached"),
        (PROMPT[:, :1], 0, None),
    ):
        plain, length = model.generate(prompt, **GREEDY), prompt.shape[1]
        cold = drafted(pair, prompt, how)
        if cache == "attached":
            attach(model, store)
        given = {} if cache == "attached" else {"cache": cache or ChunkReuseCache(model, store)}
        warm = drafted(pair, prompt, how, **given)
        assert warm.answer.equal(plain)
        assert cold.answer.equal(plain)
        assert warm.counts == cold.counts
        counts.append(warm.counts)
        warm.rounds.assert_like(cold.rounds)
        used = last_cache(model) if cache == "attached" else given["cache"]
        assert used is not None
        assert used.report.bypass_reason is None
        assert used.report.forwarded_tokens <= (max(8, length - known + 2) if known else length)
        assert cold.forwarded - warm.forwarded == length - used.report.forwarded_tokens
        if behind is not None:
            assert warm.rounds.columns[0] == (max(behind, 1, length - known + behind) if known else length)
            assert warm.rounds.columns[1:] == cold.rounds.columns[1:]
    detach(model)
    count, accepted = (sum(each) for each in zip(*counts, strict=True))
    assert accepted < count
    assert accepted > 0 or kind.startswith("blocks")
    store.check_consistency()
    assert store.check_integrity().wrong == 0


def test_what_is_kept_matters(kind: str, pair: Pair) -> None:
    """Else the test above would show little: with other hidden states or K/V heads are given other ones."""
    model, _ = pair
    store, fill, view, find = ChunkStore(model, chunk_size=32), GrowingTensor.fill, HiddenStates.view, HeadKV.find
    first = drafted(pair, cache=ChunkReuseCache(model, store))
    with pytest.MonkeyPatch.context() as patched:
        if KINDS[kind] is None:
            patched.setattr(
                GrowingTensor,
                "fill",
                lambda self, start, stop, rows, *more: fill(
                    self, start, stop, [[0 * piece for piece in row] for row in rows], *more
                ),
            )
        else:
            patched.setattr(HiddenStates, "view", lambda *args: 0 * view(*args))
        other = drafted(pair, cache=ChunkReuseCache(model, store))
    with pytest.raises(AssertionError):
        other.rounds.assert_like(first.rounds)
    if KINDS[kind] is not None:  # and the K/V of heads changes what they draft
        seen = []
        for factor in (1, 1, -5):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(
                    HeadKV,
                    "find",
                    lambda *args, factor=factor: (
                        [factor * each for each in found] if (found := find(*args)) is not None else None
                    ),
                )
                seen.append(drafted(pair, cache=ChunkReuseCache(model, store)))
        assert seen[2].answer.equal(seen[0].answer)
        assert seen[1].rounds.shown[0].equal(seen[0].rounds.shown[0])
        assert not seen[2].rounds.shown[0].equal(seen[0].rounds.shown[0])


@pytest.mark.parametrize("how", HOWS)
def test_logits_and_processors(how: str, pair: Pair) -> None:
    """Logits of each token, and what processors make of them, are those of plain generate()."""
    model, store = pair.model, ChunkStore(pair.model, chunk_size=32)
    given: dict[str, Any] = {"repetition_penalty": 1.1, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(PROMPT, **GREEDY, **given)
    caches: list[Any] = [{}, *({"cache": ChunkReuseCache(model, store)} for _ in range(2))]
    for cache in caches:
        found: Any = drafted(pair, how=how, **given, **cache).answer
        assert found.sequences.equal(plain.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(plain.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("how", HOWS)
def test_sampling_draws_the_same(how: str, pair: Pair) -> None:
    model, store, seen = pair.model, ChunkStore(pair.model, chunk_size=32), []
    caches: list[Any] = [{}, *({"cache": ChunkReuseCache(model, store)} for _ in range(2))]
    for cache in caches:
        torch.manual_seed(5)
        seen.append(drafted(pair, how=how, do_sample=True, top_k=20, **cache).answer)
    assert seen[1].equal(seen[0])
    assert seen[2].equal(seen[0])


@pytest.mark.parametrize("how", HOWS)
def test_padding_is_not_seen(how: str, kind: str, pair: Pair) -> None:
    """Heads are given of a padded prompt what they are given of that prompt alone."""
    model = pair.model
    for width in (150, 16):
        prompt = PROMPT[:, :width]
        padded = torch.cat([torch.zeros(1, 9, dtype=torch.int64), prompt], dim=1)
        mask = (torch.arange(width + 9) >= 9)[None].long()
        plain, alone = model.generate(padded, **GREEDY, attention_mask=mask), drafted(pair, prompt, how)
        for cache in ({}, {"cache": ChunkReuseCache(model)}):
            found = drafted(pair, padded, how, attention_mask=mask, **cache)
            assert found.answer.equal(plain)
            assert found.counts == alone.counts


class _AtMost(StoppingCriteria):
    """Ends a text at a length that transformers does not know."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= PROMPT.shape[1] + 7)


@pytest.mark.parametrize("how", HOWS)
def test_what_ends_texts(how: str, pair: Pair) -> None:
    """Stop strings, criteria of a user's own, and tokens that end a text, in the middle of what is drafted."""
    model, tokenizer = pair.model, load_embedded()[1]
    store, plain = ChunkStore(model, chunk_size=16), model.generate(PROMPT, **GREEDY)
    ids = plain[0, 150:].tolist()
    texts = [tokenizer.decode(ids[at : at + 2]) for at in range(3, 17)]
    asked: list[dict[str, Any]] = [
        *({"stop_strings": [text], "tokenizer": tokenizer} for text in texts if "\ufffd" not in text),
        {"stopping_criteria": StoppingCriteriaList([_AtMost()])},
        {"eos_token_id": ids[7], "pad_token_id": 0},
    ]
    for given in asked[-3:]:
        expected = model.generate(PROMPT, **GREEDY, **given)
        assert expected.shape[1] < 150 + NEW
        caches: list[Any] = [{}, {"cache": ChunkReuseCache(model, store)}]
        for cache in caches:
            assert drafted(pair, how=how, **given, **cache).answer.equal(expected)
    longer = torch.cat([plain, random_ids(20, seed=2)], 1)
    cold, warm = drafted(pair, longer, how), drafted(pair, longer, how, cache=ChunkReuseCache(model, store))
    assert (warm.answer.equal(cold.answer), warm.counts) == (True, cold.counts)
    store.check_consistency()


@pytest.mark.parametrize("how", HOWS)
def test_what_fails_in_the_middle_of_a_draft_leaves_nothing_wrong(how: str, pair: Pair) -> None:
    """An interrupt in any forward of the heads: the same cache and others go on as if there had been none."""
    model, store = pair.model, ChunkStore(pair.model, chunk_size=16)
    cold = drafted(pair, how=how)
    for fails_at in (0, 1, 5):
        cache = ChunkReuseCache(model, store)
        calls = [0]

        def fail(_: Any, args: Any, calls: list[int] = calls, at: int = fails_at) -> None:
            calls[0] += 1
            if calls[0] > at:
                raise KeyboardInterrupt

        fail.leaves_kv_alone = True  # type: ignore[attr-defined]
        handle = pair.heads.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model.generate(PROMPT, **GREEDY, **pair.by(how), cache=cache)
        handle.remove()
        for use in (cache, ChunkReuseCache(model, store)):
            found = drafted(pair, how=how, cache=use)
            assert found.answer.equal(cold.answer)
            assert found.counts == cold.counts
    store.check_consistency()
    assert store.check_integrity().wrong == 0


def test_half_precision(kind: str, tmp_path: Path) -> None:
    pair = make_pair(kind, tmp_path, dtype=torch.bfloat16)
    store, seen = ChunkStore(pair.model, chunk_size=32), []
    for known in (False, True, True):
        found = drafted(pair, cache=ChunkReuseCache(pair.model, store))
        if (behind := KINDS[kind]) is not None:
            assert found.rounds.columns[0] == (max(behind, 1) if known else 150)
        seen.append(found.counts)
    assert seen[2] == seen[1]


@pytest.mark.parametrize("how", HOWS)
def test_heads_of_another_model_are_refused(how: str, kind: str, pair: Pair, tmp_path: Path) -> None:
    other = make_pair(kind, tmp_path / "other").model
    with pytest.raises(ValueError, match="were prepared for another model"):
        other.generate(PROMPT, **GREEDY, **pair.by(how))


def test_texts_of_any_length(pair: Pair) -> None:
    """Answers of one token and of some; what was drafted, accepted and computed plainly is all there is."""
    model, heads = pair
    trees, count = TreeDecoding(heads), 0
    for length in (1, 2, 60):
        prompt = random_ids(length, seed=length)
        for new in (1, 2, 17):
            plain = model.generate(prompt, max_new_tokens=new, do_sample=False)
            for by in ({"assistant_model": heads}, {"custom_generate": trees}):
                assert model.generate(prompt, max_new_tokens=new, do_sample=False, **by).equal(plain)
            count += new
    assert trees.stats.committed + trees.stats.plain == count
