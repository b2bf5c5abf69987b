"""`score`: the log-likelihoods of a plain forward, with every common beginning computed once, and clear refusals."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    NonFiniteLogitsError,
    Score,
    attach,
    score,
    score_ids,
)
from kvboost_hf.assets import load_embedded
from tests.conftest import EOS, counted, make_model
from tests.internals.cache import plan_batches

Pair = tuple[list[int], list[int]]

PROBE = 20  # tokens that are computed once for each model, to see whether its prompts may be cut


def few_shot(heads: int = 2, questions: int = 6, answers: int = 4, *, longest: int = 9) -> list[Pair]:
    """Questions behind a head each, and answers of different lengths to each of them."""
    chance = np.random.default_rng(0)

    def ids(low: int, high: int) -> list[int]:
        return [int(token) for token in chance.integers(2, EOS, chance.integers(low, high))]

    pairs = []
    for _ in range(heads):
        head = ids(150, 250)
        for _ in range(questions):
            question = head + ids(20, 60)
            pairs += [(question, ids(1, longest + 1)) for _ in range(answers)]
    return pairs


def plain(model: PreTrainedModel, pairs: Sequence[Pair]) -> Iterator[tuple[list[float], bool]]:
    """What a forward over each text alone gives."""
    for prefix, continuation in pairs:
        with torch.no_grad():
            logits = model(torch.tensor([prefix + continuation])).logits[0, len(prefix) - 1 : -1]
        tokens = torch.tensor(continuation)[:, None]
        logprobs = logits.log_softmax(-1).gather(1, tokens)[:, 0].tolist()
        yield logprobs, logits.argmax(-1).tolist() == continuation


def prefixes(pairs: Sequence[Pair]) -> int:
    """How many tokens there are to compute: one for each distinct beginning of a text."""
    return len({tuple((p + c)[:n]) for p, c in pairs for n in range(1, len(p + c))})


def require_equal(found: Sequence[Score], model: PreTrainedModel, pairs: Sequence[Pair]) -> None:
    for each, (logprobs, greedy) in zip(found, plain(model, pairs), strict=True):
        assert each.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        assert each.logprob == pytest.approx(sum(logprobs), abs=1e-4)
        assert each.is_greedy is greedy


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gemma2"])
def test_equal_to_plain_forwards_with_each_beginning_once(name: str, batch_size: int) -> None:
    model, pairs = make_model(name), few_shot()
    with counted(model) as work:
        found = score_ids(model, pairs, batch_size=batch_size)
    require_equal(found, model, pairs)
    # Fewer than 8 tokens behind a chunk are not looked for; rows of a batch are computed from the same column on.
    assert work.tokens <= prefixes(pairs) + PROBE + len(pairs) * (1 if batch_size == 1 else 6)
    assert work.tokens < sum(len(p + c) - 1 for p, c in pairs) / 5
    if batch_size > 1:
        assert work.calls < len(pairs) / 2


def test_with_states() -> None:
    model, pairs = make_model("falcon_h1"), few_shot(1, 4, 3)
    with counted(model) as work:
        found = score_ids(model, pairs, batch_size=4)
    require_equal(found, model, pairs)
    assert work.tokens < sum(len(p + c) - 1 for p, c in pairs) / 2


def test_greedy_continuations_are_known(llama: PreTrainedModel) -> None:
    prefix = few_shot(1, 1, 1)[0][0]
    generate: Any = llama.generate
    out = generate(torch.tensor([prefix]), max_new_tokens=5, do_sample=False, eos_token_id=None)
    best = out[0, len(prefix) :].tolist()
    other = [*best[:-1], best[-1] % 100 + 2]
    assert [each.is_greedy for each in score_ids(llama, [(prefix, best), (prefix, other)])] == [True, False]


def test_a_row_answers_for_what_it_begins_with(llama: PreTrainedModel) -> None:
    prefix, (a, b, c, d) = list(range(2, 60)), (70, 71, 72, 73)
    pairs = [(prefix, [a]), (prefix, [b, c, d]), (prefix, [b, c]), (prefix, [b]), ([*prefix, b], [d]), (prefix, [c])]
    [[row]] = plan_batches([(np.array(p + c), len(p)) for p, c in pairs], 8)
    assert len(row.ids) == len(prefix) + 2
    assert sorted(row.texts) == list(range(6))
    with counted(llama) as work:
        found = score_ids(llama, pairs)
    require_equal(found, llama, pairs)
    assert work.tokens == len(prefix) + 2


def test_batches_hold_each_text_once_in_rows_of_a_kind() -> None:
    pairs = few_shot(3, 10, 4)
    texts = [(np.array(p + c), len(p)) for p, c in pairs]
    batches = plan_batches(texts, 4, kind=lambda length: length > 230)
    assert sorted(text for batch in batches for row in batch for text in row.texts) == list(range(len(texts)))
    assert max(map(len, batches)) == 4
    for batch in batches:
        assert len({len(row.ids) > 230 for row in batch}) == 1
    assert plan_batches([], 4) == []


def test_the_settings_of_attach_hold(llama: PreTrainedModel) -> None:
    pairs = few_shot(1, 2, 2)
    store = ChunkStore(llama)
    attach(llama, store, salt="one")
    score_ids(llama, pairs)
    assert store.stats()["tokens"] >= prefixes(pairs)
    with counted(llama) as again:
        score_ids(llama, pairs)
    attach(llama, store, salt="two")
    with counted(llama) as salted:
        score_ids(llama, pairs)
    assert again.tokens < 50 < prefixes(pairs) <= salted.tokens


def test_a_cache_of_the_caller_runs_it_and_goes_on(llama: PreTrainedModel) -> None:
    pairs, store = few_shot(1, 2, 2), ChunkStore(llama)
    cache = ChunkReuseCache(llama, store)
    ids = torch.tensor([pairs[0][0]])
    generate: Any = llama.generate
    before = generate(ids, past_key_values=cache, max_new_tokens=4)
    with counted(llama) as work:
        require_equal(score_ids(llama, pairs, cache=cache), llama, pairs)
        after = generate(ids, past_key_values=cache, max_new_tokens=4)
    assert after.equal(before)
    assert (cache.stores_prompts_whole, cache.judge) == (False, None)
    assert len(store) > 0
    plain_again = sum(len(p + c) for p, c in pairs)  # of `require_equal`
    assert work.tokens - plain_again < prefixes(pairs) - ids.shape[1] + PROBE + 40


def test_the_model_is_as_it_was(llama: PreTrainedModel) -> None:
    llama.train()
    llama.model.layers[0].eval()
    before = [module.training for module in llama.modules()]
    pairs = few_shot(1, 2, 2)
    found = score_ids(llama, pairs)
    assert [module.training for module in llama.modules()] == before
    assert all(parameter.grad is None for parameter in llama.parameters())
    require_equal(found, llama.eval(), pairs)


@pytest.mark.daily
@pytest.mark.parametrize("length", [1, 6])
def test_of_nan_nothing_is_stored(llama: PreTrainedModel, length: int) -> None:
    store = ChunkStore(llama, chunk_size=16)
    good, bad = list(range(2, 80)), [*range(80, 140), 5]
    with torch.no_grad():
        llama.model.embed_tokens.weight[120] = float("nan")
    cache = ChunkReuseCache(llama, store)
    score_ids(llama, [(good, [3] * length)], cache=cache)
    stored = store.stats()["tokens"]
    assert stored >= len(good)
    with pytest.raises(NonFiniteLogitsError, match=r"logits for pair [012] are NaN or infinite"):
        score_ids(llama, [(bad, [3] * length), (bad, [4] * length), (bad[:50], [4])], cache=cache)
    cache.reset()
    assert store.stats()["tokens"] == stored
    require_equal(score_ids(llama, [(good, [4])], cache=cache), llama, [(good, [4])])


# Texts


def straightforward(model: PreTrainedModel, tokenizer: Any, prefix: str, continuation: str) -> float:
    """As lm_eval has it."""
    kept = prefix.rstrip()
    whole = tokenizer(prefix + continuation)["input_ids"]
    start = len(tokenizer(kept)["input_ids"])
    [(logprobs, _)] = plain(model, [(whole[:start], whole[start:])])
    return sum(logprobs)


def test_texts_of_one_prefix_and_of_many() -> None:
    model, tokenizer = load_embedded()
    prefixes = ["The lamp is red. The box is", "Anna lives in Oslo. Where does Anna live? "]
    continuations = [[" red.", " blue."], ["In Oslo.", "Rome", "In Rome."]]
    found = score(model, tokenizer, prefixes, continuations)
    for prefix, texts, scores in zip(prefixes, continuations, found, strict=True):
        wanted = [straightforward(model, tokenizer, prefix, text) for text in texts]
        assert [each.logprob for each in scores] == pytest.approx(wanted, abs=1e-4)
        alone = score(model, tokenizer, prefix, texts)
        assert [each.logprob for each in alone] == pytest.approx(wanted, abs=1e-4)
    assert score(model, tokenizer, "The lamp", []) == []


class Tokens:
    """A tokenizer of letters, in which some pairs of them are one token."""

    def __init__(self, bos: str | None = "^") -> None:
        self.bos_token = bos

    def __call__(self, text: str | list[str], *, add_special_tokens: bool) -> dict[str, Any]:
        if not isinstance(text, str):
            return {"input_ids": [self(each, add_special_tokens=add_special_tokens)["input_ids"] for each in text]}
        if add_special_tokens and self.bos_token:
            text = self.bos_token + text
        return {"input_ids": [ord(letter) for letter in text.replace("ab", "Z")]}


def test_merged_tokens_spaces_and_beginnings(llama: PreTrainedModel) -> None:
    def expect(prefix: str, continuation: str, start: str, rest: str) -> None:
        ids = [ord(letter) for letter in start], [ord(letter) for letter in rest]
        [text] = score(llama, Tokens(), prefix, [continuation])
        assert text == score_ids(llama, [ids])[0]

    expect("xa", "bcd", "^xa", "cd")  # the prefix is ^xa, and ^xZcd goes on with cd behind three tokens
    expect("xy ", "cd", "^xy", " cd")
    expect("^xy", "cd", "^xy", "cd")
    expect("", "cd", "^", "cd")
    with pytest.raises(ValueError, match=r"Continuation 'b' has no token of its own behind 'xa'.* Move the last word"):
        score(llama, Tokens(), "xa", ["c", "b"])
    with pytest.raises(ValueError, match=r"`prefix` is empty, and the tokenizer has no `bos_token` .*eos_token"):
        score(llama, Tokens(bos=None), "", ["c"])
    with pytest.raises(ValueError, match="Continuation 1 of 'xy' is empty"):
        score(llama, Tokens(), "xy", ["c", ""])
    with pytest.raises(ValueError, match=r"must be a sequence of texts for one prefix, got 'cd'. Pass \[text\]"):
        score(llama, Tokens(), "xy", "cd")
    with pytest.raises(ValueError, match="must have a list for each of the 2 prefixes, got 1"):
        score(llama, Tokens(), ["xy", "x"], [["c"]])


def test_what_cannot_be_scored_stores_nothing(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama)
    attach(llama, store)
    good = (list(range(2, 60)), [3])
    limit = llama.config.max_position_embeddings
    assert len(score_ids(llama, [([5] * limit, [6])], batch_size=1)) == 1  # as long as it may be
    store.clear()
    bad: list[tuple[Any, str]] = [
        (
            ([5] * limit, [6, 7]),
            rf"Pair 1 has {limit} tokens of prefix and 2 of continuation, and .* reads {limit} at",
        ),
        (([], [6]), r"The prefix of pair 1 must be ids of the shape \[n\], n > 0, got \[0\]. Begin with"),
        (([6], []), r"The continuation of pair 1 must be ids of the shape \[n\], n > 0, got \[0\]. Leave out"),
        ((torch.tensor([[6]]), [5]), r"The prefix of pair 1 must be .*, got \[1, 1\]"),
        (([6], [5.5]), "The continuation of pair 1 must be ids, which are integers, got torch.float32"),
        (([6, -1], [5]), "Ids of pair 1 must be from 0 to 199, .* got -1. Tokenize"),
        (([6], [200]), "Ids of pair 1 must be from 0 to 199, .* got 200. Tokenize"),
    ]
    for pair, said in bad:
        with pytest.raises(ValueError, match=said):
            score_ids(llama, [good, pair])
    for size in (0, True, 2.0):
        with pytest.raises(ValueError, match=f"`batch_size` must be a positive integer, got {size}. Pass 8."):
            score_ids(llama, [good], batch_size=size)  # type: ignore[arg-type]
    assert len(store) == 0
