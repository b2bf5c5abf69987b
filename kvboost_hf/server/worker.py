"""The thread that runs the model: one piece of a prompt, then one token for each running text, and so on.

    submit ──▶ waiting ──▶ prompt, piece by piece ──▶ batch, a token a step ──▶ finished
                             ChunkReuseCache            BatchKV

A long prompt keeps nobody waiting for more than one of its pieces, and a text that ends makes room at once. What was
computed, prompt and answer, is in the store when a text has ended.
"""

import inspect
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.identity.model_state import ModelState
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import (
    cache_argument,
    has_own_cache,
    input_device,
    padding_reason,
    probe_ids,
    probe_reason,
    require_cache,
    rope_regime,
)
from kvboost_hf.config import DraftTreeConfig, KVQuantConfig, ReusePolicy
from kvboost_hf.errors import StoreClosedError
from kvboost_hf.ngrams import common_prefix
from kvboost_hf.offload.build import streaming_stats
from kvboost_hf.server.batch import BatchKV
from kvboost_hf.server.drafted import DraftedText, Drafts
from kvboost_hf.server.embedding import EmbeddingJob
from kvboost_hf.server.jobs import (
    ConstraintError,
    DrainingError,
    Event,
    FinishReason,
    Job,
    Listener,
    QueueFullError,
    TokenLogprob,
    TooLongError,
)
from kvboost_hf.server.nothing_kept import NothingKept
from kvboost_hf.server.pins import Pins
from kvboost_hf.server.row import Row
from kvboost_hf.server.sampling import choose_rows
from kvboost_hf.server.sharing import sharing_reason
from kvboost_hf.server.waiting import WaitingLine

_log = logging.getLogger("kvboost_hf.server")

_PATIENCE = 4  # pieces of other prompts that the first prompt lets pass


class ModelEngine:
    """Runs jobs on a model, in a thread of its own. See `Engine`.

    Args:
        model: A causal language model in eval mode.
        tokenizer: Its tokenizer.
        store: Where K/V is kept; None for a new one. Once it is closed jobs go on, and nothing is kept.
        policy: How stored K/V may be used.
        live_quant: How texts under way hold K/V as codes, each in a cache of its own; None holds it as it is.
        max_batch_size: Texts under way at once, prompts included.
        max_queue_size: Jobs that may wait besides.
        prefill_chunk_size: Tokens of a prompt that are computed at once, at most.
        batch_window_ms: How long the first job after a pause waits for others, in milliseconds.
        max_model_len: Tokens of prompt and answer together, at most; None for what the model has positions for.
        max_live_tokens: Tokens of all texts under way, answers at their longest; None for no limit.
        max_client_share: Of the places to wait and of `max_live_tokens`, what one client may have.
        draft: A smaller model with the same vocabulary, which drafts for a text that runs alone; None for no drafts.
        draft_trees: How large its trees are; None for the default.

    Raises:
        ValueError: for a model that cannot be served, a draft that does not fit it, or numbers that are not positive.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        store: ChunkStore | None = None,
        policy: ReusePolicy | None = None,
        live_quant: KVQuantConfig | None = None,
        max_batch_size: int = 8,
        max_queue_size: int = 64,
        prefill_chunk_size: int = 256,
        batch_window_ms: float = 0,
        max_model_len: int | None = None,
        max_live_tokens: int | None = None,
        max_client_share: float = 1.0,
        draft: PreTrainedModel | None = None,
        draft_trees: DraftTreeConfig | None = None,
    ) -> None:
        require_cache(model)
        limits = {
            "max_batch_size": max_batch_size,
            "max_queue_size": max_queue_size,
            "prefill_chunk_size": prefill_chunk_size,
            "max_model_len": max_model_len,
            "max_live_tokens": max_live_tokens,
        }
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be positive, got {value}.")
        if not 0 < max_client_share <= 1:
            raise ValueError(f"`max_client_share` must be more than 0 and at most 1, got {max_client_share}.")
        self.model, self.tokenizer = model, tokenizer
        self.store = store if store is not None else ChunkStore(model)
        self._policy, self._live_quant = policy if policy is not None else ReusePolicy(), live_quant
        self._max_batch, self._max_queue, self._piece = max_batch_size, max_queue_size, prefill_chunk_size
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._max_len = max_model_len or positions or 2**31
        self._max_live, self._window_s = max_live_tokens, batch_window_ms / 1000
        self._share = max_client_share
        cache = ChunkReuseCache(model, self.store, live_quant=live_quant)
        ModelState.of(model).fingerprint.look(model)
        self._takes_rows = (
            cache.lending_reason is None
            and live_quant is None  # a batch would hold it as it is
            and rope_regime(model, self._max_len) == b""  # a long row would change the frequencies of the others
            and (probe_reason(model) or padding_reason(model)) is None
        )
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._device = input_device(model)
        if (reason := self._unfit_reason()) is not None:
            raise ValueError(
                f"{type(model).__name__} cannot be served: {reason}. Call its own generate(), or serve another model."
            )
        self._drafts = Drafts.of(model, cache, draft, draft_trees) if draft is not None else None
        self._changed = threading.Condition()
        self._waiting: WaitingLine[Row] = WaitingLine(lambda row: row.job)
        self._prompts: list[Row] = []  # under way, in the order in which they were taken
        self._running: list[Row] = []  # in the order of the rows of the batch
        self._last_pieces: dict[bytes, int] = {}  # by client: when it last had a piece of a prompt computed, in pieces
        self._embeddings: deque[EmbeddingJob] = deque()
        self._in_place = self._takes_rows and sharing_reason(model) is None
        self._batch = BatchKV(model, in_place=self._in_place)
        self._pins = Pins()
        self._draining = self._given_up = self._closed = False
        self._counts: Counter[str] = Counter()
        self._tiers: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._pace = 0.0  # seconds that a job takes, smoothed
        self._thread = threading.Thread(target=self._run, name="kvboost-hf engine", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def _unfit_reason(self) -> str | None:
        """Why the model cannot run jobs, or None: found out by a short prompt and a token behind it."""
        if has_own_cache(self.model):
            return "it keeps what it has computed in a cache class of its own, and takes no other"
        ids, cache = probe_ids(self.model), ChunkReuseCache(self.model, NothingKept(self.model))
        try:
            for start, stop in ((0, ids.shape[1] - 1), (ids.shape[1] - 1, ids.shape[1])):
                self._forward(cache, ids[:, start:stop], start)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # models fail in ways of their own on what they were not written for
            return f"it fails on a prompt of {len(ids[0]) - 1} tokens and one more ({type(error).__name__}: {error})"
        return None

    @property
    def vocab_size(self) -> int:
        """See `Engine`."""
        model: Any = self.model
        return int(model.get_output_embeddings().weight.shape[0])

    @property
    def max_model_len(self) -> int:
        """See `Engine`."""
        return self._max_len

    # Called by any thread

    def submit(self, job: Job, listener: Listener) -> Row:
        """See `Engine`."""
        row = Row(job, listener, time.perf_counter())
        prompt, longest = len(job.ids), job.longest
        if not prompt:
            raise ValueError("The prompt must have at least one token, got none.")
        for limit, what in ((self._max_len, "the context window"), (self._max_live, "the memory of this server")):
            if limit is not None and longest > limit:
                most = max(limit - job.options.max_tokens, 0)
                raise TooLongError(
                    f"A prompt of {prompt} tokens with {job.options.max_tokens} new ones takes {longest}, which "
                    f"exceeds {what} of {limit}. Shorten it to {most} tokens, or ask for fewer new ones.",
                    most,
                )
        with self._changed:
            self._require_place(len(self._waiting))
            if (own := self._waiting.of(job.client)) >= math.ceil(self._share * self._max_queue):
                raise QueueFullError(
                    f"{own} of your requests are waiting, as many as may be of one client. Try again later.",
                    max(1.0, self._pace * own / self._max_batch),
                )
            self._waiting.append(row)
            self._changed.notify_all()
        return row

    def embed(self, texts: Sequence[Sequence[int]]) -> Future[list[list[float]]]:
        """See `Engine`. One text, or a piece of it, is embedded between two steps."""
        longest = max(map(len, texts))
        if longest > self._max_len:
            raise TooLongError(
                f"A text of {longest} tokens is longer than the model's context of {self._max_len}. Cut it into "
                "several.",
                self._max_len,
            )
        asked = EmbeddingJob(texts)
        with self._changed:
            self._require_place(sum(not job.future.cancelled() for job in self._embeddings))
            self._embeddings.append(asked)
            self._changed.notify_all()
        return asked.future

    def _require_place(self, waiting: int) -> None:
        if self._draining or self._closed:
            raise DrainingError("The server is about to end and takes no more requests.")
        if waiting >= self._max_queue:
            raise QueueFullError(
                f"{waiting} requests are waiting, as many as may. Try again later.",
                max(1.0, self._pace * waiting / self._max_batch),
            )

    def stats(self) -> dict[str, Any]:
        """See `Engine`."""
        with self._changed:
            return {
                "waiting": len(self._waiting),
                "prompts": len(self._prompts),
                "running": len(self._running),
                "embeddings": len(self._embeddings),
                "draining": self._draining,
                "batch_bytes": self._batch.nbytes,
                **{name: self._counts[name] for name in ("prompt_tokens", "cached_tokens", "computed_tokens")},
                **{name: self._counts[name] for name in ("generated_tokens", "steps", "pieces")},
                "cached_tokens_by_tier": dict(self._tiers),
                "finished": dict(self._finished),
                "streaming": asdict(streamed) if (streamed := streaming_stats(self.model)) is not None else {},
                "speculation": self._drafts.figures if self._drafts is not None else {},
                "store": dict(self.store.stats()),
            }

    def drain(self, timeout_s: float) -> bool:
        """See `Engine`."""
        with self._changed:
            self._draining = True
            ended = self._changed.wait_for(lambda: not self._count(), timeout_s)
            self._given_up = self._given_up or not ended
            return ended

    def close(self) -> None:
        """End all jobs, and the thread."""
        with self._changed:
            self._draining = self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # The thread

    def _count(self) -> int:
        return len(self._waiting) + len(self._prompts) + len(self._running) + len(self._embeddings)

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            with self._changed:
                idle = not self._count()
                self._changed.wait_for(lambda: self._closed or self._count())
                if idle and self._window_s:
                    self._changed.wait_for(lambda: self._closed or self._count() >= self._max_batch, self._window_s)
                if self._closed:
                    break
                self._admit()
            try:
                self._end_those_that_must()
                if self._embeddings:
                    self._embed_next()
                if self._prompts:
                    self._run_prompts()
                if self._running:
                    self._run_step()
            except Exception as error:  # such as no memory for the batch: what it holds is no longer sure
                self._fail_all(error)
        for row in [*self._prompts, *self._running]:
            self._end(row, "cancelled")
        while (left := self._waiting.take()) is not None:
            self._tell_end(left, "cancelled")
        for job in self._embeddings:
            job.fail(DrainingError("The server has ended."))

    def _embed_next(self) -> None:
        """The next piece of a text of the first request for embeddings. After each text another request is first."""
        job = self._embeddings[0]
        ended = job.advance(self.model, self._piece if self._takes_rows else None)
        with self._changed:
            if ended:
                self._embeddings.popleft()
                self._changed.notify_all()
            elif job.between:  # K/V is there of one text at a time
                self._embeddings.rotate(-1)

    def _admit(self) -> None:
        """Take jobs from the line as long as there is room; it is kept for a client that has nothing under way."""
        while len(self._waiting):
            busy = {row.job.client for row in (*self._prompts, *self._running)}
            row = self._waiting.take(lambda row: row.job.client not in busy and self._has_room(row))  # noqa: B023
            if row is None and self._waiting.clients <= busy:
                row = self._waiting.take(self._has_room)
            if row is None:
                break
            self._prompts.append(row)

    def _has_room(self, row: Row) -> bool:
        """Whether a job may begin: in memory, and in the batch, which a client that has nothing in it may exceed."""
        under_way, longest = [*self._prompts, *self._running], row.job.longest
        own = [other.job.longest for other in under_way if other.job.client == row.job.client]
        if len(under_way) >= (self._max_batch if own else 2 * self._max_batch):
            return False
        if self._max_live is None:
            return True
        if own and sum(own) + longest > self._share * self._max_live:
            return False
        return sum(other.job.longest for other in under_way) + longest <= self._max_live

    def _end_those_that_must(self) -> None:
        """End what was cancelled or has taken too long, waiting or not."""
        now = time.perf_counter()
        if self._given_up:
            self._give_up()
        with self._changed:
            waiting = [row for row in self._waiting if row.must_end(now) is not None]
            for row in waiting:
                self._waiting.remove(row)
        for row in waiting:
            self._tell_end(row, row.must_end(now) or "cancelled")
        for row in [*self._prompts, *self._running]:
            if (reason := row.must_end(now)) is not None:
                self._end(row, reason)

    def _give_up(self) -> None:
        """Cancel all that is left: its time to drain is over."""
        with self._changed:
            for row in (*self._waiting, *self._prompts, *self._running):
                row.cancel()
            while self._embeddings:
                self._embeddings.popleft().fail(DrainingError("The server is about to end, and gave the request up."))
            self._changed.notify_all()

    def _next_prompt(self) -> Row:
        """Of the client whose turn it is, the one with the least left, unless its first has waited for long enough."""
        turn = min(self._prompts, key=lambda row: self._last_pieces.get(row.job.client, 0)).job.client
        own = [row for row in self._prompts if row.job.client == turn]
        row = own[0] if own[0].passed >= _PATIENCE else min(own, key=lambda row: row.left)
        for other in own:
            other.passed = 0 if other is row else other.passed + 1
        self._last_pieces[turn] = self._counts["pieces"] + 1
        return row

    def _run_prompts(self) -> None:
        """A piece of a prompt, or several short ones."""
        room = self._piece
        while self._prompts and room > 0:
            room -= self._run_piece(self._next_prompt(), room)

    def _run_piece(self, row: Row, room: int) -> int:
        """The next piece of a prompt, of at most `room` tokens to compute; returns how many they were."""
        try:
            computed, logits = self._prefill(row, room)
            if row.left:
                return computed
            self._begin_text(row)
            if not row.job.options.max_tokens:
                if row.job.pin_share and row.cache is not None:
                    row.pinned = self._pins.keep(self.store, row.job, row.cache)
                self._end(row, "length")
                return computed
        except StoreClosedError:
            self._keep_nothing()
            row.cache, row.done = None, 0
            return 0
        except Exception as error:
            self._fail([row], error)
            return room
        self._prompts.remove(row)
        self._running.append(row)
        self._take([row], logits)
        return computed

    def _prefill(self, row: Row, room: int) -> tuple[int, torch.Tensor]:
        """Compute the next piece of a prompt; returns its tokens, and the logits [1, vocab_size] behind it."""
        ids = torch.tensor([row.job.ids], device=self._device)
        known = row.done
        if row.cache is None:
            row.started = time.perf_counter()
            row.cache, shared = self._open(row)
            row.cache.in_own_loop = True
            known = max(row.cache.stored_tokens(ids), shared)
        whole = self._policy.mode == "blend" or not self._takes_rows  # which cannot be cut
        stop = len(row.job.ids) if whole else min(known + room, len(row.job.ids))
        logits = self._forward(row.cache, ids[:, row.done : stop], row.done)
        row.done = stop
        self._counts["pieces"] += 1
        return stop - known, logits

    def _forward(self, cache: ChunkReuseCache | None, ids: torch.Tensor, start: int) -> torch.Tensor:
        """Run the model on tokens [1, tokens] of one row from `start` on; returns the logits [1, vocab_size]."""
        given: dict[str, Any] = {cache_argument(self.model): cache}
        if self._takes_positions:  # as generate() does: some models would count otherwise
            given["position_ids"] = torch.arange(start, start + ids.shape[1], device=self._device)[None]
        model: Any = self.model
        logits: torch.Tensor = model(
            input_ids=ids, logits_to_keep=1, use_cache=True, return_dict=True, **given
        ).logits[:, -1]
        return logits

    def _open(self, row: Row) -> tuple[ChunkReuseCache, int]:
        """A cache for a row: one that goes on from another row's, if that has more of its prompt than a chunk.

        Returns:
            The cache, and how many tokens it shares.
        """
        policy = replace(self._policy, mode="exact") if row.job.pin_share else self._policy
        others = [
            each
            for each in (*self._running, *self._prompts)
            if each.cache is not None and each.job.salt == row.job.salt and each.cache.policy == policy
        ]
        shared = [min(common_prefix(each.job.ids, row.job.ids), each.done) for each in others]
        most = max(shared, default=0)
        if self._takes_rows and most >= self.store.chunker.chunk_size:
            other = others[shared.index(most)].cache
            assert other is not None
            cache = other.fork()
            cache.begin_anew()
            return cache, most
        return ChunkReuseCache(self.model, self.store, policy, row.job.salt, live_quant=self._live_quant), 0

    def _begin_text(self, row: Row) -> None:
        report = row.begin(self.tokenizer)
        self._counts.update(
            prompt_tokens=report.prompt_tokens,
            cached_tokens=report.reused_tokens,
            computed_tokens=report.forwarded_tokens,
        )
        self._tiers.update(report.tier_tokens)

    def _run_step(self) -> None:
        """One more token for each running text; some more for one that runs alone and is drafted for."""
        alone = len(self._running) == 1
        drafts = self._drafts if alone and not self._prompts else None
        drafts = drafts if drafts is not None and drafts.take(self._running[0].job) else None
        together = self._takes_rows and not (alone and (drafts or self._in_place or not len(self._batch)))
        if together:
            self._join_batch()
        rows = list(self._running)
        if not rows:
            return
        try:
            if not together and len(self._batch):
                self._read_batch(0)
                self._batch.leave(0)
            if drafts is not None:
                self._run_round(drafts, rows[0])
                return
            if together:
                logits = self._batch.step([row.ids[-1] for row in rows])
            else:
                logits = torch.cat([self._step_alone(row) for row in rows])
        except Exception as error:
            self._fail(rows, error)
            return
        self._counts["steps"] += 1
        self._take(rows, logits)

    def _run_round(self, drafts: Drafts, row: Row) -> None:
        assert row.cache is not None
        assert row.sampler is not None
        if row.drafted is None:
            row.drafted = DraftedText(drafts, row.job, row.sampler)
        reason = row.drafted.run(row.cache, row.ids, partial(self._add, row, now=time.perf_counter()))
        self._counts["steps"] += 1
        if reason is not None:
            self._end(row, reason)

    def _join_batch(self) -> None:
        """Put the rows into the batch that are not in it: the last ones. Those that there is no memory for fail."""
        for row in self._running[len(self._batch) :]:
            assert row.cache is not None
            row.joined = len(row.job.ids) + len(row.ids) - 1  # the last token is computed next
            # Moved chunks are computed for the one text that they are in.
            owner = row.job.salt if self._policy.mode == "exact" else row
            try:
                self._batch.join(row.cache.read(), [*row.job.ids, *row.ids[:-1]], owner)
            except Exception as error:
                self._fail([row], error)

    def _read_batch(self, place: int) -> None:
        """Have a row's own cache hold what the batch has computed for it."""
        row = self._running[place]
        new = self._batch.length(place) - row.joined
        if new and row.cache is not None:
            positions = torch.arange(row.joined, row.joined + new, device=self._device)[None]
            said = row.joined - len(row.job.ids)
            ids = torch.tensor([row.ids[said : said + new]], device=self._device)
            row.cache.extend(ids, positions, self._batch.read(place, new))

    def _step_alone(self, row: Row) -> torch.Tensor:
        """In its own cache: for one that is alone, and for models whose rows cannot be put together."""
        ids, start = torch.tensor([row.ids[-1:]], device=self._device), len(row.job.ids) + len(row.ids) - 1
        try:
            return self._forward(row.cache, ids, start)
        except StoreClosedError:  # before anything was computed
            self._keep_nothing()
            return self._forward(row.cache, ids, start)

    def _keep_nothing(self) -> None:
        """Go on without the store, which somebody has closed."""
        _log.warning("The store was closed: from now on nothing is kept.")
        self.store = NothingKept(self.model, chunker=self.store.chunker)
        for row in (*self._prompts, *self._running):
            if row.cache is not None:
                row.cache.store = self.store

    def _take(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        """Choose a token for each row, tell of it, and end the rows that it ends."""
        try:
            chosen = choose_rows([row.sampler for row in rows if row.sampler is not None], logits)
        except Exception as error:
            self._fail(rows, error)
            return
        now = time.perf_counter()
        for row, choice in zip(rows, chosen, strict=True):
            try:
                if isinstance(choice, Exception):
                    raise choice
                reason = self._add(row, *choice, now)
            except Exception as error:
                self._fail([row], error)
                continue
            if reason is not None:
                self._end(row, reason)

    def _add(self, row: Row, token: int, logprob: TokenLogprob | None, now: float) -> FinishReason | None:
        reason, progress = row.add(token, logprob, now)
        self._counts["generated_tokens"] += 1
        self._tell(row, progress)
        return reason

    def _end(self, row: Row, reason: FinishReason) -> None:
        """Hand what was computed to the store, make room, and tell of the end."""
        try:
            self._store(row)
        except Exception:
            _log.exception("K/V of a finished text could not be stored.")
        self._forget(row)
        self._tell_end(row, reason)

    def _store(self, row: Row) -> None:
        cache = row.cache
        if cache is None:
            return
        if self._takes_rows and row in self._running:
            place = self._running.index(row)
            if place < len(self._batch):
                self._read_batch(place)
        cache.store_tails()

    def _forget(self, row: Row) -> None:
        row.cache = None
        if row in self._running:
            self._leave(self._running.index(row))
        elif row in self._prompts:
            self._prompts.remove(row)

    def _fail(self, rows: Sequence[Row], error: Exception) -> None:
        """End rows whose forward has failed, without what it may have left behind."""
        expected = isinstance(error, ConstraintError)
        if not expected:
            _log.error("A forward has failed.", exc_info=error)
        for row in rows:
            self._forget(row)
            if expected:
                self._tell_end(row, "constraint", str(error))
            else:
                self._tell_end(row, "error", f"{type(error).__name__}: {error}")

    def _fail_all(self, error: Exception) -> None:
        """End all rows under way."""
        rows = [*self._prompts, *self._running]
        self._prompts, self._running = [], []
        self._batch.clear()
        self._fail(rows, error)

    def _leave(self, place: int) -> None:
        """Remove a row; of those in the batch, which come first and in its order, the last one takes its place."""
        if (held := len(self._batch)) > place:
            self._batch.leave(place)  # first: if it fails, the row is still there to be told
            self._running[place] = self._running[held - 1]
            place = held - 1
        del self._running[place]

    def _tell_end(self, row: Row, reason: FinishReason, error: str | None = None) -> None:
        now = time.perf_counter()
        with self._changed:
            self._finished[reason] += 1
            self._pace = 0.8 * self._pace + 0.2 * (now - (row.started or now))
            self._changed.notify_all()
        self._tell(row, row.finished(reason, error, now))

    def _tell(self, row: Row, event: Event) -> None:
        try:
            row.listener(event)
        except Exception:  # nobody listens any more
            row.cancelled = True
            _log.exception("A listener has failed.")
