"""Every way to draft with every cache: what is said, and what of it went through the target."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, product
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    KVQuantConfig,
    StreamingConfig,
    TreeDecoding,
    attach,
    check_model_compatibility,
    load_assistant,
    lookup_assistant,
    stream_layers,
)
from kvboost_hf.assets import load_embedded, load_embedded_draft
from recipes.evaluate_draft import held_out_prompts, use_constant_drafts
from tests.internals.assets import make_documents
from tests.internals.compat import decoder_layers
from tests.internals.offload import use_backend
from tests.offload.poisoning import PoisoningBackend

ASSISTANTS = ("adaptive", "constant", "lookup", "prompt lookup", "early exit", "other tokenizer", "trees")
DRAFTS = ("adaptive", "constant", "other tokenizer", "trees")  # models of their own, with K/V of their own
CACHES = ("none", "cold", "warm", "conversation", "codes", "reuse by both")
ATTENTIONS = ("sdpa", "kvboost_fa2")
CODES = KVQuantConfig(window=16, exact_layers=0)
LENGTH = 5  # of drafts, but those of the adaptive schedule and of lookups in a store
_CHUNK = 32


@dataclass(frozen=True, slots=True)
class Combination:
    """What takes part in one call of `generate()`."""

    assistant: str
    cache: str
    streamed: bool
    attention: str

    def __str__(self) -> str:
        return f"{self.assistant}-{self.cache}-{'streamed' if self.streamed else 'resident'}-{self.attention}"


def combinations() -> list[Combination]:
    """Each assistant with each cache, targets and attentions in turn, so that any two values that can meet do."""
    return [
        Combination(assistant, cache, (a + c) % 2 == 1, ATTENTIONS[(a + c // 2) % 2])
        for (a, assistant), (c, cache) in product(enumerate(ASSISTANTS), enumerate(CACHES))
        if cache != "reuse by both" or assistant in DRAFTS
    ]


Conversation = list[torch.Tensor]  # the prompt of each turn, which begins with that of the turn before


def conversations(tokenizer: PreTrainedTokenizerBase, chats: int, *, seed: int) -> list[Conversation]:
    """Single questions and chats of three turns, as many of both, that the reader was not trained on."""
    header = torch.tensor(tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
    found = []
    for ids in held_out_prompts(tokenizer, 2 * chats, seed=seed):
        ends = (ids[0].unfold(0, len(header), 1) == header).all(1).nonzero()[:, 0] + len(header)
        found.append([ids[:, :end] for end in ends.tolist()])
    return found


class Passes:
    """Counts passes through the last layer of a model, and the tokens in them: drafts by early exit end before it."""

    leaves_kv_alone = True  # read by the fingerprint: other hooks may change what a model computes

    def __init__(self) -> None:
        self.passes = self.tokens = 0

    def note(self, _: Any, args: tuple[Any, ...]) -> None:
        """The hook."""
        self.passes += 1
        self.tokens += args[0].shape[1]

    @contextmanager
    def of(self, model: PreTrainedModel) -> Iterator[None]:
        """Counts within a `with` block."""
        layer: Any = decoder_layers(model)[-1]
        handle = layer.register_forward_pre_hook(self.note)
        try:
            yield
        finally:
            handle.remove()


class Reader:
    """The embedded reader with one attention, resident or streamed, and a store that knows its plain answers.

    Of a streamed one the first layer stays. Copies take no time; or, on the clock of `backend`, those of each pass
    take `pass_s` seconds.
    """

    def __init__(
        self, attention: str, streamed: bool, dtype: torch.dtype | None = None, pass_s: float | None = None
    ) -> None:
        self.model, self.tokenizer = load_embedded(dtype, attention)
        if streamed:
            # The second and the last layer take turns in a slot. The third has a slot for itself, and comes once.
            nbytes = 2 * sum(tensor.nbytes for tensor in self.model.model.layers[1].parameters())
            self.backend = PoisoningBackend(link_bytes_per_s=nbytes / pass_s if pass_s else None)
            with use_backend(lambda: self.backend):
                stream_layers(self.model, StreamingConfig(keep_first_k=1), device="cpu")
        self.store = self.new_store()

    def new_store(self) -> ChunkStore:
        return ChunkStore(self.model, chunk_size=_CHUNK)

    def answer(self, prompt: torch.Tensor, cache: ChunkReuseCache | None = None, **kwargs: Any) -> torch.Tensor:
        """The prompt and what is said to it, greedily."""
        given: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        ids: Any = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, **given, **kwargs
        )
        return ids

    def plain(self, chats: Sequence[Conversation], *, codes: bool) -> list[torch.Tensor]:
        """What is said without an assistant, and without a cache of ours but for codes, which may change answers."""
        return [self.answer(prompt, self.coded() if codes else None) for chat in chats for prompt in chat]

    def coded(self) -> ChunkReuseCache:
        return ChunkReuseCache(self.model, self.new_store(), live_quant=CODES)

    def warm(self, chats: Sequence[Conversation]) -> None:
        """Fill the store with prompts and plain answers."""
        for chat in chats:
            for prompt in chat:
                cache = ChunkReuseCache(self.model, self.store)
                self.answer(prompt, cache)
                cache.store_tails()


@dataclass(slots=True)
class Done:
    """What came of all prompts of a combination."""

    answers: list[torch.Tensor]
    target: Passes
    draft: Passes  # none, unless it is a model of its own
    reused: int = 0  # tokens of prompts that the target did not compute

    def equal(self, expected: Sequence[torch.Tensor]) -> int:
        """Answers that are as they should be."""
        return sum(torch.equal(*pair) for pair in zip(self.answers, expected, strict=True))


def run(reader: Reader, combination: Combination, chats: Sequence[Conversation], **kwargs: Any) -> Done:
    """Answer all prompts with an assistant; `kwargs` are more arguments of `generate()`."""
    done = Done([], Passes(), Passes())
    draft = make_draft(combination.assistant, reader) if combination.assistant in DRAFTS else None
    if combination.cache == "reuse by both":
        assert draft is not None
        check_model_compatibility(draft)  # its forwards are not to be counted
        attach(draft, ChunkStore(draft, chunk_size=_CHUNK))
    with done.target.of(reader.model), done.draft.of(draft) if draft is not None else nullcontext():
        for chat in chats:
            kept = ChunkReuseCache(reader.model, reader.new_store())
            for prompt in chat:
                cache = kept if combination.cache == "conversation" else _CACHES[combination.cache](reader)
                given = _given(combination.assistant, reader, cache, draft)
                done.answers.append(reader.answer(prompt, cache, **given, **kwargs))
                done.reused += 0 if cache is None else cache.report.reused_tokens
    return done


_CACHES: dict[str, Callable[[Reader], Any]] = {
    "none": lambda reader: None,
    "cold": lambda reader: ChunkReuseCache(reader.model, reader.new_store()),
    "warm": lambda reader: ChunkReuseCache(reader.model, reader.store),
    "codes": Reader.coded,
    "reuse by both": lambda reader: ChunkReuseCache(reader.model, reader.store),
}


def parted(found: Any, plain: Any, prompt_tokens: int, dtype: torch.dtype) -> tuple[float, float | None]:
    """How far logits are off up to the first token that differs, and how far the best two are apart there.

    Both in units of the epsilon of `dtype` times the largest logit; the latter None if no token differs.
    """
    off = 0.0
    for at, (ours, theirs) in enumerate(zip(found.logits, plain.logits, strict=False), start=prompt_tokens):
        unit = torch.finfo(dtype).eps * float(theirs.abs().max())
        off = max(off, float((ours - theirs).abs().max()) / unit)
        if found.sequences[0, at] != plain.sequences[0, at]:
            best, second = theirs[0].topk(2).values.tolist()
            return off, (best - second) / unit
    assert torch.equal(found.sequences, plain.sequences)
    return off, None


def make_draft(assistant: str, reader: Reader) -> PreTrainedModel:
    """A model that drafts."""
    attention = reader.model.config._attn_implementation
    draft = load_embedded_draft(reader.model.dtype, attention)
    if assistant == "other tokenizer":
        draft.tokenizer = retokenize(draft, reader.tokenizer)  # type: ignore[assignment]
        use_constant_drafts(draft, LENGTH)
        return draft
    clock = count().__next__  # a tick at each look, so that lengths do not depend on the machine
    if assistant == "trees":
        draft.trees = TreeDecoding(draft, clock=clock)  # type: ignore[assignment]
        return draft
    return load_assistant(draft, target=reader.model, schedule=assistant, num_assistant_tokens=LENGTH, clock=clock)  # type: ignore[arg-type]


def _given(assistant: str, reader: Reader, cache: ChunkReuseCache | None, draft: Any) -> dict[str, Any]:
    if assistant == "prompt lookup":
        return {"prompt_lookup_num_tokens": LENGTH}
    if assistant == "early exit":
        return {"assistant_early_exit": 2}
    if assistant == "lookup":
        return {"assistant_model": lookup_assistant(reader.model, reader.store if cache is None else cache.store)}
    if assistant == "other tokenizer":
        return {
            "assistant_model": draft,
            "tokenizer": reader.tokenizer,
            "assistant_tokenizer": draft.tokenizer,
        }
    if assistant == "trees":
        return {"custom_generate": draft.trees}
    return {"assistant_model": draft}


def retokenize(draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Have a draft read and write in another vocabulary, of pairs that are frequent in text of the same world.

    Tokens that both vocabularies have keep their embeddings; the others, pieces of words, have none.
    """
    facts = [fact for document in make_documents(random.Random(0), 25) for fact in document.facts]
    texts = [line for fact in facts for line in (fact.question + "\n", fact.answer)]
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=sorted(tokenizer.all_special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(texts, trainer)
    other = PreTrainedTokenizerFast(
        tokenizer_object=found, eos_token=tokenizer.eos_token, pad_token=tokenizer.pad_token
    )
    theirs, table = tokenizer.get_vocab(), draft.get_input_embeddings().weight.detach()
    draft.resize_token_embeddings(len(other))
    with torch.no_grad():
        weight = draft.get_input_embeddings().weight.zero_()
        for token, number in other.get_vocab().items():
            if token in theirs:
                weight[number] = table[theirs[token]]
    for config in (draft.config, draft.generation_config):
        config.eos_token_id, config.pad_token_id = other.eos_token_id, other.pad_token_id
    return other
