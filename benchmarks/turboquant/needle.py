"""A fact somewhere in a long text: found, or lost, with K/V that has been through a codec."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.turboquant.checks import Check, Figures
from benchmarks.turboquant.sabotage import controls
from kvboost_hf.assets.texts import encode
from kvboost_hf.assets.world import make_documents
from kvboost_hf.cache.codecs import Codec, make_codec
from kvboost_hf.cache.planning.chunks import ContentChunker
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.config import KVQuantConfig, ReusePolicy
from kvboost_hf.verify.measure import answer

_WORDS = 96  # of a document of the text around it
_MAX_NEW_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt, and the words that its answer must have."""

    ids: tuple[int, ...]
    value: str


def make_needles(
    tokenizer: PreTrainedTokenizerBase, num_tokens: int, depths: Sequence[float], seed: int
) -> list[Needle]:
    """A fact at each depth, from 0 to 1, of documents of about `num_tokens`, at least one of which follows."""
    return [_needle(tokenizer, num_tokens, depth, random.Random(f"{seed}/{depth}")) for depth in depths]


def _needle(tokenizer: PreTrainedTokenizerBase, num_tokens: int, depth: float, rng: random.Random) -> Needle:
    hidden = make_documents(rng, 1, num_words=1)[0]
    texts: list[str] = []
    length, told = 0, {hidden.facts[0].subject}
    while length < num_tokens:
        document = make_documents(rng, 1, num_words=_WORDS, exclude=told)[0]
        told |= {fact.subject for fact in document.facts}
        length += len(tokenizer.encode(document.text))
        texts.append(document.text)
    texts.insert(round(depth * (len(texts) - 1)), hidden.text)
    fact = hidden.facts[0]
    ids = encode(tokenizer, [{"role": "user", "content": "\n\n".join([*texts, fact.question])}])
    return Needle(tuple(ids), fact.value)


def needle_checks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    needles: Sequence[Needle],
    configs: dict[str, KVQuantConfig],
    advance: Callable[[], None],
) -> Iterator[Check]:
    """As many needles must be found by each codec as are found with K/V as it is."""

    def found(codec: Codec) -> Figures:
        each = [_find(model, tokenizer, needle, codec) for needle in needles]
        advance()
        return {"found": sum(right for right, _ in each) / len(each), "decoded": min(share for _, share in each)}

    raw = found(make_codec("raw"))
    # With nothing to be found, no codec can show anything.
    yield Check(name="needles, raw", found=raw, allowed={"found": (1 / len(needles), 1.0)}, controls={})
    for name, config in configs.items():
        yield Check(
            name=f"needles, {name}",
            found=found(make_codec(config)),
            allowed={"found": (raw["found"], 1.0)},
            controls={kind: found(codec) for kind, codec in controls(config, "keys").items()},
        )


def _find(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, needle: Needle, codec: Codec
) -> tuple[bool, float]:
    """Whether the answer has it, and the share of the prompt's K/V that came out of the codec."""
    store = ChunkStore(model, chunker=ContentChunker.for_tokenizer(tokenizer))
    store.codec = codec
    ids = torch.tensor([needle.ids])
    store.warm(ids)
    cache = ChunkReuseCache(model, store, ReusePolicy(min_prefill_saving=0))
    said: Any = tokenizer.decode(answer(model, ids, _MAX_NEW_TOKENS, cache).ids, skip_special_tokens=True)
    return needle.value.lower() in str(said).lower(), cache.report.reused_tokens / len(needle.ids)
