"""generate() with `lookup_assistant` gives what it gives without, in fewer forwards where text comes again."""

from itertools import product
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility, lookup_assistant
from tests.conftest import VOCAB, as_inputs, counted, make_model, random_ids
from tests.internals.assisted import LookupAssistant

NEW = 48


def generated(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, int]:
    """What is generated, and in how many forwards."""
    with counted(model) as work:
        out = model.generate(**as_inputs(ids), **{"max_new_tokens": NEW, "eos_token_id": None} | kwargs)
    return out, work.calls


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bloom", "mistral", "gemma2", "deepseek_v3"])
def test_greedy_is_the_same_cold_warm_and_over_turns(name: str) -> None:
    model = make_model(name)
    check_model_compatibility(model)  # its forwards are not to be counted
    store = ChunkStore(model, chunk_size=32)
    assistant = lookup_assistant(model, store)
    ids = random_ids(70, seed=1)
    plain, plain_calls = generated(model, ids)
    calls = []
    for _ in range(2):
        out, n = generated(model, ids, past_key_values=ChunkReuseCache(model, store), assistant_model=assistant)
        assert out.equal(plain)
        calls.append(n)
    repeats_itself = calls[0] < 10  # the prompt alone tells what comes
    assert calls[1] < calls[0] or repeats_itself
    assert calls[0] <= plain_calls == NEW
    cache, history = ChunkReuseCache(model, store), ids
    for turn in range(3):
        history = torch.cat([history, random_ids(9, seed=turn)], dim=1)
        wanted, _ = generated(model, history, max_new_tokens=20)
        history, _ = generated(model, history, max_new_tokens=20, past_key_values=cache, assistant_model=assistant)
        assert history.equal(wanted)


def test_stored_text_is_generated_in_few_forwards(llama: PreTrainedModel) -> None:
    ids = random_ids(70, seed=1)
    plain, _ = generated(llama, ids)
    store = ChunkStore(llama, chunk_size=32)
    store.warm(plain)
    out, calls = generated(llama, ids, assistant_model=lookup_assistant(llama, store))
    assert out.equal(plain)
    assert calls == 3  # of 1, 25 and 22 tokens
    out, few_at_once = generated(llama, ids, assistant_model=lookup_assistant(llama, store, num_assistant_tokens=3))
    assert out.equal(plain)
    assert few_at_once == NEW / 4 + 1


@pytest.mark.parametrize("stored", ["nothing", "other text", "text of another salt"])
def test_forwards_are_saved_by_the_stored_text_alone(llama: PreTrainedModel, stored: str) -> None:
    ids = random_ids(70, seed=1)
    plain, _ = generated(llama, ids)
    store = ChunkStore(llama, chunk_size=32)
    if stored == "other text":
        store.warm(plain.flip(1))
    elif stored != "nothing":
        store.warm(plain, salt="Anna")
    out, calls = generated(llama, ids, assistant_model=lookup_assistant(llama, store))
    assert out.equal(plain)
    assert calls > NEW * 3 / 4
    if stored == "text of another salt":
        out, calls = generated(llama, ids, assistant_model=lookup_assistant(llama, store, salt="Anna"))
        assert out.equal(plain)
        assert calls == 3


def test_wrong_text_is_rejected(llama: PreTrainedModel) -> None:
    """The store knows the prompt, and each time another continuation."""
    ids = random_ids(70, seed=1)
    plain, _ = generated(llama, ids)
    wrong = plain.clone()
    wrong[:, 72::5] += 1
    store = ChunkStore(llama, chunk_size=32)
    store.warm(wrong % VOCAB)
    out, calls = generated(llama, ids, assistant_model=lookup_assistant(llama, store))
    assert out.equal(plain)
    assert NEW / 5 < calls < NEW


def drafted(model: PreTrainedModel, store: ChunkStore, ids: list[int], length: int = 4, **kwargs: int) -> list[int]:
    """What an assistant proposes after `ids`."""
    config = model.generation_config
    out = lookup_assistant(model, store, **kwargs).generate(  # type: ignore[arg-type]
        input_ids=torch.tensor([ids]), max_new_tokens=length, generation_config=config
    )
    n = out.sequences.shape[1] - len(ids)
    assert out.sequences[0, :-n].tolist() == ids
    assert [score.shape for score in out.scores] == [(1, VOCAB)] * n
    assert torch.stack(out.scores, dim=1)[0].softmax(-1).nonzero()[:, 1].tolist() == out.sequences[0, -n:].tolist()
    return out.sequences[0, -n:].tolist()


def test_the_longer_match_counts(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama, chunk_size=16)
    store.warm([50, 51, 4, 5, 6, 7, 60, 61, 62, 63, 64, 65])
    assert drafted(llama, store, [5, 6, 7, 8, 9, 4, 5, 6, 7]) == [60, 61, 62, 63]
    assert drafted(llama, store, [4, 5, 6, 7, 8, 9, 4, 5, 6, 7]) == [8, 9, 4, 5]
    assert drafted(llama, store, [5, 6, 7, 8, 9, 4, 5, 6, 7], max_ngram=3) == [8, 9, 4, 5]
    assert drafted(llama, store, [90, 6, 7]) == [60, 61, 62, 63]
    assert drafted(llama, store, [6, 90, 80, 90, 70, 90]) == [70, 90]  # one token tells too little for more
    assert drafted(llama, store, [90, 91, 92]) == [92]
    assert drafted(llama, store, [90, 91, 92, 90, 91, 92], 7) == [90, 91, 92, 90, 91, 92, 90]
    assert drafted(llama, store, [64, 65]) == [65]


def test_proposals_end_with_the_text_and_before_media(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama, chunk_size=16)
    store.warm([50, 51, 52, 53, 54, 55, 56, 57, 58, 59])
    llama.generation_config.eos_token_id = [40, 54]
    assert drafted(llama, store, [51, 52], 7) == [53, 54]
    llama.config.image_token_id = 54
    assert drafted(llama, store, [51, 52], 7) == [53]
    assert drafted(llama, store, [52, 53], 7) == [53]


@pytest.mark.parametrize("at", [0, 5, 16, 17])
def test_eos_inside_a_proposal(llama: PreTrainedModel, at: int) -> None:
    ids = random_ids(70, seed=1)
    plain, _ = generated(llama, ids)
    store = ChunkStore(llama, chunk_size=32)
    store.warm(plain)
    eos = int(plain[0, 70 + at])
    wanted, _ = generated(llama, ids, eos_token_id=eos)
    out, calls = generated(llama, ids, eos_token_id=eos, assistant_model=lookup_assistant(llama, store))
    assert out.equal(wanted)
    assert calls <= 2


@pytest.mark.parametrize("new", [1, 2, 3])
def test_few_new_tokens(llama: PreTrainedModel, new: int) -> None:
    ids = random_ids(70, seed=1)
    store = ChunkStore(llama, chunk_size=32)
    store.warm(generated(llama, ids)[0])
    wanted, _ = generated(llama, ids, max_new_tokens=new)
    out, calls = generated(llama, ids, max_new_tokens=new, assistant_model=lookup_assistant(llama, store))
    assert out.equal(wanted)
    assert calls == min(new, 2)


class LyingAssistant(LookupAssistant):
    """Claims that it could have proposed any token."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        out = super().generate(*args, **kwargs)
        out.scores = tuple(torch.zeros_like(score) for score in out.scores)  # type: ignore[assignment]
        return out


@pytest.mark.slow
@pytest.mark.parametrize("honest", [True, False])
def test_sampling_keeps_the_distribution(honest: bool) -> None:
    words, new, draws = 4, 3, 500
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        config = LlamaConfig(vocab_size=words, initializer_range=0.15, eos_token_id=None, **sizes)
        model = LlamaForCausalLM(config).eval()
    store = ChunkStore(model, chunk_size=16)
    ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]])
    answers = torch.tensor(list(product(range(words), repeat=new)))
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(len(answers), -1), answers], dim=1)).logits[:, -new - 1 : -1]
    expected = logits.log_softmax(-1).gather(2, answers[..., None]).sum((1, 2)).exp() * draws
    assert expected.min() > 1
    assistant = lookup_assistant(model, store) if honest else LyingAssistant(model, store, 16, 8, None)
    found = torch.zeros(len(answers))
    with torch.random.fork_rng(), counted(model) as work:
        torch.manual_seed(0)
        for _ in range(draws):
            out = model.generate(
                **as_inputs(ids), do_sample=True, top_k=0, max_new_tokens=new, assistant_model=assistant
            )
            found[int(out[0, -new:] @ torch.tensor([16, 4, 1]))] += 1
    assert draws + honest <= work.calls < draws * new - 100  # proposals were taken, but not all of them
    chi_square = float(((found - expected) ** 2 / expected).sum())
    assert (chi_square < 120) == honest  # 63 degrees of freedom: exceeded once in 50,000 times


def test_bad_arguments(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama)
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        lookup_assistant(llama, store, num_assistant_tokens=0)
    for max_ngram in (1, 9):
        with pytest.raises(ValueError, match="max_ngram"):
            lookup_assistant(llama, store, max_ngram=max_ngram)
