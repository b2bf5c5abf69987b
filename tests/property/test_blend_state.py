"""Blended and exact caches on one store, as a state machine: by its history only plain K/V is found."""

from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from transformers.cache_utils import Cache

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from tests.conftest import as_inputs, left_pad, make_model, random_ids
from tests.internals.cache import LayerKVReader, StoredChunk, make_layers

MODEL = make_model("llama")
CHUNK = 16
WORDS = [random_ids(n, seed=i) for i, n in enumerate((5, 16, 16, 40))]

texts = st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=5)


def policy(repair: Any, ratio: float) -> ReusePolicy:
    return ReusePolicy(mode="blend", repair=repair, recompute_ratio=ratio, min_prefill_saving=0, sink_tokens=0)


def text(words: list[int]) -> torch.Tensor:
    return torch.cat([WORDS[word] for word in words], dim=1)


class BlendMachine(RuleBasedStateMachine):
    """Prompts are made of few words, so that they share beginnings, and hold the same elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ChunkStore(MODEL, chunk_size=CHUNK)
        self.exact = ChunkReuseCache(MODEL, self.store)
        self.whole = ChunkReuseCache(MODEL, self.store, policy("query", 1.0))
        self.blended = ChunkReuseCache(MODEL, self.store, policy("none", 0.0))
        self.said: torch.Tensor | None = None  # the blended cache's last prompt and its answer

    def generate(self, rows: list[Any], cache: ChunkReuseCache | None, tokens: int, **kwargs: Any) -> Any:
        inputs = as_inputs(rows[0]) if len(rows) == 1 else left_pad(*rows)
        generate: Any = MODEL.generate
        return generate(**inputs, past_key_values=cache, max_new_tokens=tokens, do_sample=False, **kwargs)

    def check_counts(self, cache: ChunkReuseCache, rows: list[torch.Tensor]) -> None:
        report = cache.report
        assert report.bypass_reason is None
        assert report.prompt_tokens == sum(row.shape[1] for row in rows)
        assert 0 <= report.recomputed_tokens <= report.moved_tokens <= report.prompt_tokens - report.exact_tokens
        assert report.exact_tokens + report.moved_tokens == sum(report.tier_tokens.values())
        assert (report.moved_reason is None) or not report.moved_tokens

    @rule(words=st.lists(texts, min_size=1, max_size=2), tokens=st.sampled_from([1, 20]), whole=st.booleans())
    def ask_for_what_is_plain(self, words: list[list[int]], tokens: int, whole: bool) -> None:
        rows = [text(row) for row in words]
        cache = self.whole if whole else self.exact
        assert torch.equal(self.generate(rows, cache, tokens), self.generate(rows, None, tokens))
        self.check_counts(cache, rows)

    @rule(words=st.lists(texts, min_size=1, max_size=2), tokens=st.sampled_from([1, 20]), beams=st.integers(1, 2))
    def blend(self, words: list[list[int]], tokens: int, beams: int) -> None:
        rows = [text(row) for row in words]
        found = self.generate(rows, self.blended, tokens, num_beams=beams)
        self.check_counts(self.blended, [row for row in rows for _ in range(beams)])
        self.said = found if len(rows) == 1 else None

    @precondition(lambda self: self.said is not None)
    @rule(more=texts, between=st.booleans())
    def go_on(self, more: list[int], between: bool) -> None:
        """Perhaps after somebody else has asked for the same."""
        if between:
            self.generate([self.said], self.exact, 1)
        rows = [torch.cat([self.said, text(more)], dim=1)]
        self.generate(rows, self.blended, 1)
        self.check_counts(self.blended, rows)
        self.said = rows[0] if rows[0].shape[1] < 500 else None

    @rule(at=st.integers(0, 80), tokens=st.integers(1, 60), to=st.integers(0, 140), new=texts)
    def edit(self, at: int, tokens: int, to: int, new: list[int]) -> None:
        """A span goes, another one comes, and a third is put elsewhere, as far as there is text."""
        held = self.blended.get_seq_length()
        stop = min(at + tokens, held)
        if at >= stop or self.said is None:
            return
        fits = stop + 40 <= held and (to <= at or stop + 40 <= to <= held)
        moved = [(stop, stop + 40, to)] if fits else []
        found = self.blended.edit(replace=[(at, stop, text(new))], move=moved)
        assert self.blended.get_seq_length() == found.shape[1]
        self.check_counts(self.blended, list(found[:, None]))
        self.said = found[:1] if found.shape[1] < 500 else None

    @rule()
    def repair(self) -> None:
        self.blended.repair()

    @rule(columns=st.integers(1, 60))
    def crop(self, columns: int) -> None:
        self.blended.crop(-min(columns, self.blended.get_seq_length()))

    @rule()
    def fork(self) -> None:
        self.blended = self.blended.fork()

    @rule()
    def reset(self) -> None:
        self.blended.reset()

    def teardown(self) -> None:
        self.blended.reset()
        for chunk in self.store.inspect().chunks.values():
            if not chunk.content_only:
                self.require_plain(chunk)

    def require_plain(self, chunk: StoredChunk) -> None:
        chain = [chunk]
        while chain[0].parent != chunk.root:
            chain.insert(0, self.store.inspect().chunks[chain[0].parent])
        tokens = np.concatenate([link.tokens for link in chain])
        layers = make_layers(MODEL)
        with torch.no_grad():
            MODEL(torch.from_numpy(tokens)[None], past_key_values=Cache(layers=[layer.native for layer in layers]))
        reader = LayerKVReader(chunk.kv)
        for idx, layer in enumerate(layers):
            expected = layer.columns(0, chunk.start, len(tokens))
            torch.testing.assert_close(reader.layer(idx), expected, rtol=1e-3, atol=1e-3)


TestBlend = BlendMachine.TestCase
TestBlend.settings = settings(max_examples=60, stateful_step_count=10, deadline=None)
