"""`CallRunner`: runs the generate() calls of a `KVBoost`, one after the other, with a cache for each mode."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel, TextIteratorStreamer

from kvboost_hf import forks
from kvboost_hf.assisted.tree_decoding import TreeDecoding
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import CACHE
from kvboost_hf.config import ReusePolicy
from kvboost_hf.engine.call import generate_rows
from kvboost_hf.engine.encode import Prompt
from kvboost_hf.engine.results import GenerationMode, GenerationResult
from kvboost_hf.engine.settings import EngineSettings
from kvboost_hf.engine.watch import Watch
from kvboost_hf.verify.correctness import require_plain

_log = logging.getLogger("kvboost_hf")


class CallRunner:
    """Runs the calls of one engine.

    Args:
        model: A causal language model in eval mode.
        tokenizer: Its tokenizer.
        store: Where K/V is kept.
        policy: How stored K/V may be used.
        settings: `live_config` and `prefill_chunk_size` are used.
        assistant: Drafts tokens for calls of one row; None for no drafts.

    Attributes:
        lock: Held while a call runs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        store: ChunkStore,
        policy: ReusePolicy,
        settings: EngineSettings,
        assistant: PreTrainedModel | TreeDecoding | None,
    ) -> None:
        self.lock, self._pid = forks.rlock(), os.getpid()
        self._model, self._tokenizer, self._assistant = model, tokenizer, assistant
        self._prefill_chunk_size = settings.prefill_chunk_size
        exact = ChunkReuseCache(model, store, replace(policy, mode="exact"), live_quant=settings.live_config)
        blend = exact if policy.mode == "exact" else ChunkReuseCache(model, store, policy)
        self._caches = {GenerationMode.PREFIX_CACHE: exact, GenerationMode.CHUNK_KV_REUSE: blend}
        self._said_no_drafts = False

    def run(
        self, rows: Sequence[Tokens], mode: GenerationMode, options: dict[str, Any], watch: Watch
    ) -> tuple[list[list[int]], ReuseReport]:
        """Call generate() for prompts.

        Args:
            rows: Token ids [n] of each prompt.
            mode: Which K/V may be reused.
            options: For generate().
            watch: Sees the tokens as they come.

        Returns:
            The new tokens of each row, and what was reused.
        """
        given = dict(options)
        if self._prefill_chunk_size:
            given.setdefault("prefill_chunk_size", self._prefill_chunk_size)
        if "stop_strings" in given:
            given["tokenizer"] = self._tokenizer
        cache = self._caches.get(mode)
        with self.lock:
            self._start_over_after_fork()
            if cache is None:
                require_plain(self._model)
            else:
                given |= {CACHE: cache, **self._drafts(len(rows))}
            answers = generate_rows(self._model, rows, self._pad(), watch, given)
            if cache is not None:
                return answers, cache.report
        tokens = sum(len(row) for row in rows)
        return answers, ReuseReport(prompt_tokens=tokens, forwarded_tokens=tokens)

    def _start_over_after_fork(self) -> None:
        """Another thread may have been in the middle of a call when this process was forked."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            for cache in {id(cache): cache for cache in self._caches.values()}.values():
                cache.reset()

    def stream(self, row: Tokens, mode: GenerationMode, options: dict[str, Any]) -> Iterator[str]:
        """Call generate() for a prompt; yields the text as it comes. Closing the iterator ends the call."""
        streamer = TextIteratorStreamer(self._tokenizer, skip_special_tokens=True)
        watch = Watch(len(row), streamer)

        def run() -> None:
            try:
                self.run([row], mode, options, watch)
                streamer.end()  # type: ignore[no-untyped-call]
            finally:  # whatever has failed, the tokenizer included, nobody waits for more
                streamer.text_queue.put(streamer.stop_signal)

        with ThreadPoolExecutor(max_workers=1) as thread:
            call = thread.submit(run)
            try:
                yield from filter(None, streamer)
            finally:
                watch.cancel()
            call.result()

    def results(
        self,
        prompts: Sequence[Prompt],
        rows: Sequence[Tokens],
        mode: GenerationMode,
        ran: tuple[list[list[int]], ReuseReport],
        began: float,
        watch: Watch,
    ) -> list[GenerationResult]:
        """The results of a call that has ended now, from what `run` returned; it began at `began` (perf_counter)."""
        assert watch.first_at is not None
        total_s, (answers, report) = time.perf_counter() - began, ran
        return [
            GenerationResult(
                mode=mode,
                prompt=prompt,
                output_text=self._tokenizer.decode(answer, skip_special_tokens=True),
                generated_tokens=len(answer),
                ttft_ms=1000 * (watch.first_at - began),
                total_ms=1000 * total_s,
                tokens_per_sec=len(answer) / total_s,
                kv_reuse_ratio=cached / len(row),
                prompt_tokens=len(row),
                cached_tokens=cached,
                token_ids=tuple(answer),
                report=report,
            )
            for prompt, row, answer, cached in zip(
                prompts, rows, answers, report.row_tokens or (0,) * len(rows), strict=True
            )
        ]

    def reset(self) -> None:
        """Forget the K/V of the last prompts."""
        for cache in self._caches.values():
            cache.reset()

    def _drafts(self, rows: int) -> dict[str, Any]:
        if self._assistant is None:
            return {}
        if rows > 1:
            if not self._said_no_drafts:
                self._said_no_drafts = True
                _log.warning("Batches are decoded without the assistant, which drafts for one row.")
            return {}
        drafts_trees = isinstance(self._assistant, TreeDecoding)
        return {"custom_generate" if drafts_trees else "assistant_model": self._assistant}

    def _pad(self) -> int:
        found = (getattr(self._model.generation_config, "pad_token_id", None), self._tokenizer.pad_token_id)
        return next((int(pad) for pad in found if pad is not None), 0)
