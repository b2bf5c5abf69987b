"""`KVBoost`: one object with a model, its tokenizer and a store that every call asks first."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from os import PathLike
from typing import Any, Self

import torch
from transformers import PreTrainedModel, TextIteratorStreamer

from kvboost_hf.assisted.load import load_assistant, speculation_stats
from kvboost_hf.assisted.stats import SpeculationStats
from kvboost_hf.assisted.tree_decoding import TreeDecoding
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import available_device
from kvboost_hf.compatibility import check_model_compatibility
from kvboost_hf.config import ReusePolicy, StreamingConfig
from kvboost_hf.engine.call import call_options, generate_rows
from kvboost_hf.engine.encode import Message, Prompt, PromptEncoder
from kvboost_hf.engine.grouping import group_by_prefix
from kvboost_hf.engine.load import load
from kvboost_hf.engine.prompts import CHECK_PROMPTS
from kvboost_hf.engine.results import GenerationMode, GenerationResult, WarmResult
from kvboost_hf.engine.settings import SETTINGS, checked_settings, choice
from kvboost_hf.engine.shared import store_shared, with_computed
from kvboost_hf.engine.warm import warm
from kvboost_hf.engine.watch import Watch
from kvboost_hf.migration import refuse
from kvboost_hf.offload.build import streaming_stats
from kvboost_hf.offload.stats import StreamingStats
from kvboost_hf.verify import CorrectnessReport, verify_correctness
from kvboost_hf.verify.correctness import require_plain

_log = logging.getLogger("kvboost_hf")

DEFAULT_MODEL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"


class KVBoost:
    """Answers prompts, and computes nothing that its store holds.

    It may be used from several threads, whose calls run one after the other. It keeps the K/V of its last prompt.

    Args:
        model: A causal language model in eval mode, not attached.
        tokenizer: Its tokenizer.
        device: Move the model there; None leaves it where it is.
        strict: Raise if the model cannot reuse K/V; else only warn.
        assistant: Drafts for single prompts: a model, its name, or a `TreeDecoding`.
        policy: How stored K/V may be used, in place of `recompute_strategy` and the settings that go with it.
        store: Made for the model; in place of the settings that one is made by, and the caller's to close.
        options: The fields of `kvboost_hf.engine.EngineSettings`, such as `recompute_strategy` and `chunk_size`.

    Raises:
        ValueError: for settings that are none, that do not go together or that only the kvboost package has, a device
            that is not there, models that cannot be served, and a store of another model.
        TypeError: for names that neither has.

    Example:
        >>> from kvboost_hf import KVBoost
        >>> from kvboost_hf.assets import load_embedded
        >>> engine = KVBoost(*load_embedded())
        >>> document = "Maria lives in Rome. She owns the lamp. It is red. " * 20
        >>> bool(engine.warm(document))
        True
        >>> result = engine.generate(document + "Where does Maria live?", max_new_tokens=8)
        >>> result.output_text, result.kv_reuse_ratio > 0.9
        ('Maria lives in Rome.', True)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        device: torch.device | str | None = None,
        strict: bool = True,
        assistant: str | PreTrainedModel | TreeDecoding | None = None,
        policy: ReusePolicy | None = None,
        store: ChunkStore | None = None,
        **options: Any,
    ) -> None:
        refuse("KVBoost", options)
        self.settings = checked_settings(options, policy, store)
        if device is not None:
            model.to(available_device(device))  # type: ignore[arg-type]
        require_plain(model)
        if not callable(tokenizer):
            raise ValueError(
                f"`tokenizer` must be that of the model, got {tokenizer!r}. Pass AutoTokenizer.from_pretrained(NAME)."
            )
        check_model_compatibility(model, strict=strict)
        self.model, self.tokenizer = model, tokenizer
        self.policy = self.settings.policy() if policy is None else policy
        self._prompts = PromptEncoder(tokenizer, templated=self.settings.chat_template)
        self.store = self.settings.store(model, tokenizer) if store is None else store
        self.assistant: PreTrainedModel | TreeDecoding | None = None
        if isinstance(assistant, TreeDecoding):
            self.assistant = assistant
        elif assistant is not None:
            self.assistant = load_assistant(assistant, target=model)
        live = self.settings.live_config
        exact = ChunkReuseCache(model, self.store, replace(self.policy, mode="exact"), live_quant=live)
        blend = exact if self.policy.mode == "exact" else ChunkReuseCache(model, self.store, self.policy)
        self._caches = {GenerationMode.PREFIX_CACHE: exact, GenerationMode.CHUNK_KV_REUSE: blend}
        self._lock = threading.RLock()
        self._said_no_drafts = False

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | PathLike[str] | None = None,
        strict: bool = True,
        *,
        streaming_config: StreamingConfig | None = None,
        device: torch.device | str | None = None,
        assistant: str | PreTrainedModel | TreeDecoding | None = None,
        policy: ReusePolicy | None = None,
        **options: Any,
    ) -> Self:
        """Load a model and its tokenizer.

        Args:
            model_name: A name on the hub, or a folder; also as `model_name_or_path` or `name`. None for
                `TinyLlama/TinyLlama-1.1B-Chat-v1.0`.
            strict: See `KVBoost`.
            streaming_config: Stream the layers that do not stay on the device.
            device: Where the model computes; None for the accelerator, or the CPU where there is none.
            assistant: See `KVBoost`.
            policy: See `KVBoost`.
            options: The fields of `EngineSettings`, and arguments for transformers' `from_pretrained()`.

        Raises:
            ValueError: as `KVBoost` does; for a device that is not there, two names, or a damaged file of the model.
            OSError: there is no such model.

        Example:
            >>> from kvboost_hf.assets import EMBEDDED_MODEL_DIR
            >>> engine = KVBoost.from_pretrained(EMBEDDED_MODEL_DIR, chunk_size=64, device="cpu")
            >>> engine.generate("Anna lives in Oslo. Where does Anna live?", max_new_tokens=1).generated_tokens
            1
        """
        refuse("KVBoost", options)
        named = [model_name, *(options.pop(key, None) for key in ("model_name_or_path", "name"))]
        given = [name for name in named if name is not None]
        if len(given) > 1:
            raise ValueError(f"`model_name` must be given once, got {given}. Leave out all but one.")
        if "store" in options:
            raise ValueError(
                "`store` must be made for the model, which is not there yet. Call KVBoost(model, tokenizer, "
                "store=ChunkStore(model))."
            )
        settings = {key: options.pop(key) for key in SETTINGS & options.keys()}
        checked_settings(settings, policy)  # refuses now, not when the model is there
        model, tokenizer = load(given[0] if given else DEFAULT_MODEL, streaming_config, device, options)
        return cls(model, tokenizer, strict=strict, assistant=assistant, policy=policy, **settings)

    # Answers

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        temperature: float = 1.0,
        do_sample: bool = False,
        **kwargs: Any,
    ) -> GenerationResult:
        """Answer a prompt.

        Args:
            prompt: A text, or messages as `chat` takes them. Where the tokenizer has a chat template, a text is sent
                as the message of a user. It is sent as it is where there is none, where it has special tokens in it
                (as after `tokenizer.apply_chat_template()`), and with `KVBoost(chat_template=False)`.
            max_new_tokens: At most so many.
            mode: What may be reused. All modes give the answer of plain `generate()`, but `CHUNK_KV_REUSE` with a
                `recompute_strategy`, and all but `BASELINE` with `kv_cache_bits`.
            temperature: With `do_sample`.
            do_sample: Draw tokens; else take the likeliest.
            kwargs: For `generate()` of transformers, such as `top_p`, `stop_strings` or `prefill_chunk_size`.

        Raises:
            ValueError: for an empty prompt, an unknown mode, and arguments that the engine sets itself.
        """
        began = time.perf_counter()
        options = call_options(max_new_tokens, temperature, do_sample, kwargs)
        mode, row = choice(GenerationMode, "mode", mode), self._prompts.encode(prompt)
        watch = Watch(len(row))
        answers, report = self._run([row], mode, options, watch)
        [result] = self._results([prompt], [row], mode, answers, report, began, watch)
        return result

    def chat(
        self,
        messages: Sequence[Message],
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        temperature: float = 1.0,
        do_sample: bool = False,
        **kwargs: Any,
    ) -> GenerationResult:
        """Answer a chat: `generate` for messages. The other methods take messages in place of a text, too.

        Args:
            messages: With `role` and `content`, as `tokenizer.apply_chat_template()` takes them. Special tokens in a
                content are read as such; the server reads them as text. For tools, pass `generate` the text that
                `apply_chat_template(messages, tools=..., tokenize=False, add_generation_prompt=True)` gives.
            max_new_tokens: At most so many.
            mode: See `generate`.
            temperature: With `do_sample`.
            do_sample: Draw tokens; else take the likeliest.
            kwargs: For `generate()` of transformers.

        Raises:
            ValueError: as `generate` does; if the tokenizer has no chat template.

        Example:
            >>> from kvboost_hf.assets import load_embedded
            >>> engine = KVBoost(*load_embedded())
            >>> system = {"role": "system", "content": "You read documents and answer questions about them."}
            >>> user = {"role": "user", "content": "Anna lives in Oslo. She plays the piano. What does Anna play?"}
            >>> engine.chat([system, user]).output_text
            'Anna plays the piano.'
        """
        return self.generate(messages, max_new_tokens, mode, temperature, do_sample, **kwargs)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        temperature: float = 1.0,
        do_sample: bool = False,
        **kwargs: Any,
    ) -> Iterator[str]:
        """Answer a prompt by pieces of text, each as soon as it is sure.

        The arguments are those of `generate`. Closing the iterator ends the call behind it.

        Raises:
            ValueError: as `generate` does, at once.

        Example:
            >>> from kvboost_hf.assets import load_embedded
            >>> engine = KVBoost(*load_embedded())
            >>> prompt = "Anna lives in Oslo. Where does Anna live?"
            >>> "".join(engine.stream(prompt, 8)) == engine.generate(prompt, 8).output_text
            True
        """
        options = call_options(max_new_tokens, temperature, do_sample, kwargs)
        return self._pieces(self._prompts.encode(prompt), choice(GenerationMode, "mode", mode), options)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        do_sample: bool = False,
        **kwargs: Any,
    ) -> list[GenerationResult]:
        """Answer prompts in one batch; what all of them begin with is computed once.

        They may be of any lengths. Greedy answers are those of `generate`, up to rounding. An assistant is not used.

        Args:
            prompts: Texts, or chats, as `generate` takes them.
            max_new_tokens: At most so many for each.
            temperature: With `do_sample`.
            do_sample: Draw tokens.
            kwargs: For `generate()` of transformers, but for what ends one row of several.

        Returns:
            One result for each prompt.

        Raises:
            ValueError: as `generate` does.
        """
        began = time.perf_counter()
        rows = self._encode_all(prompts)
        options = call_options(max_new_tokens, temperature, do_sample, kwargs, rows=len(rows))
        if not rows:
            return []
        watch, mode = Watch(max(len(row) for row in rows)), GenerationMode.CHUNK_KV_REUSE
        with self._lock:
            computed = store_shared(self.store, self.policy, rows, self.settings.live_config)
            answers, report = self._run(rows, mode, options, watch)
        return self._results(prompts, rows, mode, answers, with_computed(report, computed), began, watch)

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        do_sample: bool = False,
        *,
        max_batch_size: int = 8,
        **kwargs: Any,
    ) -> list[GenerationResult]:
        """Answer any prompts: those that begin with the same chunks by `generate_batch`, the others by `generate`.

        Args:
            prompts: Texts, or chats, as `generate` takes them.
            max_new_tokens: At most so many for each.
            temperature: With `do_sample`.
            do_sample: Draw tokens.
            max_batch_size: The most prompts in a batch.
            kwargs: See `generate_batch`.

        Returns:
            One result for each prompt, in their order. Times are from the start of its batch.

        Raises:
            ValueError: as `generate` does, before anything is answered.
        """
        rows = self._encode_all(prompts)
        options = (max_new_tokens, temperature, do_sample)
        call_options(*options, kwargs, rows=len(rows))
        results: dict[int, GenerationResult] = {}
        for group in group_by_prefix([row.tolist() for row in rows], self.store.chunker.chunk_size, max_batch_size):
            if len(group) > 1:
                found = self.generate_batch([prompts[at] for at in group], *options, **kwargs)
            else:
                found = [
                    self.generate(
                        prompts[group[0]], max_new_tokens, temperature=temperature, do_sample=do_sample, **kwargs
                    )
                ]
            results |= zip(group, found, strict=True)
        return [results[at] for at in range(len(rows))]

    # The store

    def warm(self, text: Prompt, position_offset: int = 0, *, pin: bool = False) -> WarmResult:
        """Compute and store what prompts begin with, ahead of the first one.

        Args:
            text: What texts for `generate` begin with; or messages that chats begin with, such as a system message.
                It goes through the chat template as those do.
            position_offset: 0: stored K/V is moved when it is needed elsewhere.
            pin: Never evict it.

        Raises:
            ValueError: for an empty text or another offset.
            StoreFullError: if what is to be pinned does not fit into the budget.
        """
        if position_offset != 0:
            raise ValueError(
                f"`position_offset` must be 0, got {position_offset}: chunks are moved when they are needed. For "
                "texts that stand anywhere in prompts call engine.store.warm(documents=[text], tokenizer=tokenizer)."
            )
        with self._lock:
            live = self.settings.live_config
            return warm(self.store, self.policy, self._prompts.encode_start(text), pin=pin, live_quant=live)

    def cache_stats(self) -> dict[str, Any]:
        """See `ChunkStore.stats`."""
        return self.store.stats()

    def reset_cache(self) -> None:
        """Forget all K/V of the model, in all tiers. Counts in `cache_stats` go on."""
        with self._lock:
            for cache in self._caches.values():
                cache.reset()
            self.store.clear()

    # What came of it

    def verify_correctness(
        self, prompts: Sequence[Prompt] | None = None, max_new_tokens: int = 32
    ) -> CorrectnessReport:
        """Compare the answers of these settings with those of plain `generate()`, with stores of their own.

        Args:
            prompts: Texts or chats such as users would send, in the order in which they would; None for a few of our
                own.
            max_new_tokens: New tokens for each.

        Returns:
            The report, which is true if exact reuse is right, and a codec and `live_quant`, if these settings have
            them, are within the thresholds; with a `recompute_strategy` it has a row for that, too.

        Raises:
            ValueError: for no prompts, or a model that has been attached.
        """
        live = self.settings.live_config
        with self._lock:
            return verify_correctness(
                self.model,
                [row.tolist() for row in self._encode_all(CHECK_PROMPTS if prompts is None else prompts)],
                policies=[self.policy] if self.policy.mode == "blend" else [],
                live_quants=[] if live is None else [live],
                max_new_tokens=max_new_tokens,
                make_store=lambda model: ChunkStore(model, chunker=self.store.chunker, codec=self.store.codec),
            )

    def streaming_stats(self) -> StreamingStats | None:
        """What streaming has done so far; None where no layer is streamed."""
        return streaming_stats(self.model)

    def speculative_stats(self) -> SpeculationStats | None:
        """What has come of drafts so far; None without an assistant."""
        return speculation_stats(self.assistant) if self.assistant is not None else None

    # One call

    def _run(
        self, rows: Sequence[Tokens], mode: GenerationMode, options: dict[str, Any], watch: Watch
    ) -> tuple[list[list[int]], ReuseReport]:
        """The answers to rows, and what was reused."""
        given = dict(options)
        if self.settings.prefill_chunk_size:
            given.setdefault("prefill_chunk_size", self.settings.prefill_chunk_size)
        if "stop_strings" in given:
            given["tokenizer"] = self.tokenizer
        cache = self._caches.get(mode)
        with self._lock:
            if cache is None:
                require_plain(self.model)
            else:
                given |= {"past_key_values": cache, **self._drafts(len(rows))}
            answers = generate_rows(self.model, rows, self._pad(), watch, given)
            if cache is not None:
                return answers, cache.report
        tokens = sum(len(row) for row in rows)
        return answers, ReuseReport(prompt_tokens=tokens, forwarded_tokens=tokens)

    def _drafts(self, rows: int) -> dict[str, Any]:
        if self.assistant is None:
            return {}
        if rows > 1:
            if not self._said_no_drafts:
                self._said_no_drafts = True
                _log.warning("Batches are decoded without the assistant, which drafts for one row.")
            return {}
        return {"custom_generate" if isinstance(self.assistant, TreeDecoding) else "assistant_model": self.assistant}

    def _pieces(self, row: Tokens, mode: GenerationMode, options: dict[str, Any]) -> Iterator[str]:
        streamer = TextIteratorStreamer(self.tokenizer, skip_special_tokens=True)
        watch = Watch(len(row), streamer)

        def run() -> None:
            try:
                self._run([row], mode, options, watch)
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

    def _results(
        self,
        prompts: Sequence[Prompt],
        rows: Sequence[Tokens],
        mode: GenerationMode,
        answers: list[list[int]],
        report: ReuseReport,
        began: float,
        watch: Watch,
    ) -> list[GenerationResult]:
        assert watch.first_at is not None
        total_s = time.perf_counter() - began
        return [
            GenerationResult(
                mode=mode,
                prompt=prompt,
                output_text=self.tokenizer.decode(answer, skip_special_tokens=True),
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

    def _encode_all(self, prompts: Sequence[Prompt]) -> list[Tokens]:
        if isinstance(prompts, str):
            raise ValueError("`prompts` must be a sequence of prompts, got one text. Pass [text].")
        if not isinstance(prompts, Sequence):
            raise ValueError(f"`prompts` must be a sequence of prompts, got {type(prompts).__name__}. Pass a list.")
        return [self._prompts.encode(prompt) for prompt in prompts]

    def _pad(self) -> int:
        told = (getattr(self.model.generation_config, "pad_token_id", None), self.tokenizer.pad_token_id)
        return next((int(pad) for pad in told if pad is not None), 0)
