"""`ModelEngine`: the thread that runs the model. It computes a piece of a prompt, then one token of each answer.

    submit ──▶ Intake ──▶ Prefill, piece by piece ──▶ Decoding, a token a step ──▶ finished

A long prompt delays other requests by one of its pieces at most, and an answer that ends makes room at once. When a
job has ended, the K/V of its prompt and answer is in the store.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.assisted.rounds import Taken
from kvboost_hf.cache.planning.plan import Border
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.cache.store.lower import RowToServe
from kvboost_hf.cache.tiers.base import Failures
from kvboost_hf.compat import require_cache
from kvboost_hf.config import DraftTreeConfig, KVQuantConfig, ReusePolicy
from kvboost_hf.errors import StoreClosedError
from kvboost_hf.offload.build import streaming_stats
from kvboost_hf.server.engine.belongings import Beginnings, Belongings, count_bytes
from kvboost_hf.server.engine.embedding import EmbeddingJob
from kvboost_hf.server.engine.holdings import Holdings
from kvboost_hf.server.engine.intake import EngineLimits, Intake
from kvboost_hf.server.engine.model_runner import ModelRunner
from kvboost_hf.server.engine.phases import Decoding, Prefill, Round, Speculation
from kvboost_hf.server.engine.sessions import SessionTable
from kvboost_hf.server.engine.task import MORE_TOKENS, SessionRecord, Task
from kvboost_hf.server.generation.answer import choose_rows
from kvboost_hf.server.generation.speculation import Choosing, Drafts, RowDrafts, keeping_states
from kvboost_hf.server.jobs import ConstraintError, FinishReason, Job, Listener, Session, SessionChange, TokenLogprob
from kvboost_hf.server.protocol import UNLIMITED, DrainingError, ModelCard, TooLongError, UnreachableTierError

_log = logging.getLogger("kvboost_hf.server")

_FORWARDS = 8  # of short prompts between two tokens of the answers, at most
_HEARD_EVERY_S = 1.0  # what others who share a tier have removed, while nobody asks
_LOOKED_UP = 8  # prompts between two forwards, at most: each takes a millisecond


class ModelEngine:
    """Runs jobs on a model, in a thread of its own. It is the `Engine` that the server uses.

    Args:
        model: A causal language model in eval mode.
        tokenizer: The model's tokenizer.
        store: Where K/V is kept; None for a new store. After it is closed jobs go on, and nothing is kept.
        policy: How stored K/V may be used; None for exact reuse.
        live_quant: The codec of K/V of running jobs, each of which then has a cache of its own; None for K/V as the
            model computes it.
        draft: A smaller model with the same vocabulary, heads that `load_assistant` has prepared for `model`, or a
            `LookupAssistant`; None for no drafts. With heads, the hidden states that they read are kept of all texts.
        draft_trees: The size of its trees of drafts; None for the default.
        clients: Names of clients whose sessions at other servers with the same tiers are to be listed before they ask.
        clock: Seconds since 1970, for what is kept of sessions.
        limits: The fields of `EngineLimits`, such as `max_batch_size`.

    Attributes:
        holdings: Tells the fronts of a cluster what the store holds of the texts of prompts.

    Raises:
        ValueError: The model cannot be served, the draft does not fit it, or a limit is out of its range.
        TypeError: There is no such limit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        store: ChunkStore | None = None,
        policy: ReusePolicy | None = None,
        live_quant: KVQuantConfig | None = None,
        draft: PreTrainedModel | None = None,
        draft_trees: DraftTreeConfig | None = None,
        clients: Sequence[bytes] = (b"",),
        clock: Callable[[], float] = time.time,
        **limits: Any,
    ) -> None:
        require_cache(model)
        self.model, self.tokenizer = model, tokenizer
        self._limits, self._card = EngineLimits(**limits), ModelCard.of(model)
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._max_model_len = int(self._limits.max_model_len or positions or UNLIMITED)
        store = store if store is not None else ChunkStore(model)
        policy = keeping_states(policy or ReusePolicy(), draft, live_quant)
        self._runner = ModelRunner(model, store, policy, live_quant, self._max_model_len)
        reason = self._runner.lending_reason
        drafts = Drafts.of(model, reason, draft, draft_trees, policy) if draft is not None else None
        self._ahead = Speculation(self._runner, drafts)
        self.holdings = Holdings.of(model, store)
        self._intake, self._sessions = Intake(self._limits), SessionTable(self._runner, clock, clients)
        self._prefill, self._decoding = Prefill(self._runner), Decoding(self._runner, self._ahead.last)
        self._failures = Failures(_log, "The engine", (Exception,), "Requests go on")
        self._counts: Counter[str] = Counter()
        self._tiers: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="kvboost-hf engine", daemon=True)
        self._thread.start()

    @property
    def store(self) -> ChunkStore:
        """Where K/V is kept."""
        return self._runner.store

    @property
    def vocab_size(self) -> int:
        """Columns of the model's logits."""
        model: Any = self.model
        return int(model.get_output_embeddings().weight.shape[0])

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer, at most, by the context and by the memory."""
        return min(self._max_model_len, self._limits.max_live_tokens or self._max_model_len)

    @property
    def max_live_tokens(self) -> int | None:
        """Tokens of all running jobs, at most; None for no limit."""
        return self._limits.max_live_tokens

    @property
    def model_card(self) -> ModelCard:
        """What the model is."""
        return self._card

    # Called by any thread

    def submit(self, job: Job, listener: Listener) -> Task:
        """Queue a job; the engine's thread calls `listener` with its events. Raises as `Engine.submit` does."""
        task = Task(job, listener, time.perf_counter())
        self._limits.require_fit(job, self._max_model_len)
        self._intake.submit(task)
        return task

    def embed(self, texts: Sequence[Sequence[int]], client: bytes = b"") -> Future[list[list[float]]]:
        """Queue texts to embed, as `Engine.embed`. One text, or a piece of it, is embedded between two steps."""
        longest = max(map(len, texts))
        if longest > self._max_model_len:
            raise TooLongError(
                f"A text of {longest} tokens is longer than the model's context of {self._max_model_len}. Cut it into "
                "several.",
                self._max_model_len,
                tokens=longest,
                limit=self._max_model_len,
                what="text",
            )
        job = EmbeddingJob(texts, client)
        self._intake.submit_embeddings(job)
        return job.future

    def sessions(self, client: bytes | None, id: str | None = None) -> list[Session]:
        table = self._sessions

        def look() -> tuple[list[tuple[SessionRecord, Belongings]], Beginnings]:
            self._hear()
            return [(each, each.belongings) for each in table.of(client, id)], table.heads(client)

        found, heads = self._intake.call(look)
        sizes = count_bytes(self.store.held(), [own for _, own in found], heads)
        records = zip(found, sizes, strict=True)
        return self._intake.call(lambda: [table.figures(session, nbytes) for (session, _), nbytes in records])

    def change_session(self, client: bytes, id: str, change: SessionChange) -> Session | None:
        def make() -> SessionRecord | None:
            self._hear()
            return self._sessions.change(client, id, change)

        if self._intake.call(make) is None:
            return None
        return next(iter(self.sessions(client, id)), None)

    def drop_session(self, client: bytes, id: str, salt: bytes) -> dict[str, int] | None:
        table, root = self._sessions, self._runner.root_of(salt)
        roots = [] if root is None else [root]

        def drop() -> tuple[SessionRecord | None, Belongings, Beginnings]:
            self._hear()
            known = next(iter(table.of(client, id)), None)
            own, heads = table.drop(client, id, roots, self._intake.begun)
            return known, own, heads

        known, own, heads = self._intake.call(drop)
        own = replace(own, roots=own.roots | self.store.roots_beside(own.roots))
        if known is not None:  # first: who hands K/V over after this has listed the tiers lets go of it
            table.tell_dropped(client, id, own.roots)
        freed = self.store.remove(own.under(heads), lambda records: own.keys(records, heads, lost=True))
        if known is None:
            if not freed:
                return None
            table.tell_dropped(client, id, own.roots)
        if tiers := self.store.owing:
            if known is not None:
                self._intake.call(lambda: table.restore(known))
            raise UnreachableTierError(tiers)
        return freed

    def known_tokens(self, prompts: Sequence[Sequence[int]], salt: bytes) -> list[int]:
        return self._intake.call(lambda: [self._runner.known_tokens(ids, salt) for ids in prompts])

    def load(self) -> dict[str, int]:
        """How many requests are waiting, read and running, and whether the engine is draining."""
        with self._intake.changed:
            return {
                "waiting": self._intake.waiting,
                "prompts": len(self._prefill.tasks),
                "running": len(self._decoding.tasks),
                "draining": self._intake.draining,
            }

    def stats(self) -> dict[str, Any]:
        """Current figures, as numbers, strings, and dicts of them. It waits for tiers."""
        store = dict(self.store.stats())  # its tiers may take long to answer, and nobody waits for that
        streamed = streaming_stats(self.model)
        with self._intake.changed:
            return {
                **self.load(),
                "embeddings": len(self._intake.embeddings),
                "sessions": len(self._sessions),
                "pins": len(self._sessions.pins),
                "batch_bytes": self._decoding.batch_bytes,
                **{name: self._counts[name] for name in ("prompt_tokens", "cached_tokens", "computed_tokens")},
                **{name: self._counts[name] for name in ("generated_tokens", "steps", "set_aside")},
                "pieces": self._prefill.pieces,
                "cached_tokens_by_tier": dict(self._tiers),
                "finished": dict(self._intake.finished),
                "streaming": asdict(streamed) if streamed is not None else {},
                "speculation": self._ahead.figures,
                "store": store,
            }

    def drain(self, timeout_s: float) -> bool:
        """Take no more jobs, wait for the others, and cancel the rest; returns whether all ended in time."""
        return self._intake.drain(timeout_s)

    def close(self) -> None:
        """Cancel all jobs and end the thread."""
        self._intake.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def close_store(self) -> None:
        """Close the store, after `close`. What it hands over is nothing that others have dropped meanwhile."""
        self.store.close(hear=lambda: self._sessions.hear(()))

    # The thread

    @torch.no_grad()
    def _run(self) -> None:
        heard = 0.0
        while self._intake.wait(_HEARD_EVERY_S if self.store.is_shared else None):
            try:
                self._sessions.pins.expire()
            except Exception as error:
                self._failures.note("let go of pins that have ended", error)
            if time.monotonic() >= heard + _HEARD_EVERY_S:
                self._hear()
                heard = time.monotonic()
            self._intake.answer_calls()
            try:
                self._take_up()
                self._embed()
                self._compute_prompts()
                self._step()
            except Exception as error:  # the others are caught where it is known whose they are
                self._fail_all(error)
        for task in list(self._intake.admitted):
            self._end(task, "cancelled")
        for task in self._intake.take_waiting():
            self._intake.end(task, "cancelled")
        for job in self._intake.embeddings:
            job.fail(DrainingError("The server has ended."))
        self._intake.answer_calls()

    def _take_up(self) -> None:
        """Make room by ending tasks, and give it to others. Nobody waits longer for it than for one forward."""
        self._end_those_that_must()
        self._give_long_answers_room()
        unseen = self._intake.unseen(_LOOKED_UP)
        if unseen:  # before it is looked up what serves them
            self._hear()
        for task in unseen:
            self._runner.look_up(task)
            task.tell_known()
        admitted = self._intake.admit()
        if admitted:
            self._hear()
        for task in admitted:
            if task.must_tell_known:  # too short to be looked up while it waits, or one of many
                self._runner.look_up(task)
                task.tell_known()
        self._prefill.tasks += admitted

    def _hear(self) -> None:
        """Do what other servers have told."""
        try:
            self._sessions.hear(self._intake.begun)
        except Exception as error:
            self._failures.note("do what other servers have told", error)

    def _end_those_that_must(self) -> None:
        """End the tasks that were cancelled or have timed out."""
        now = time.perf_counter()
        for task in self._intake.take_ended(now):
            self._intake.end(task, task.must_end(now) or "cancelled")
        for task in list(self._intake.admitted):
            if (reason := task.must_end(now)) is not None:
                self._end(task, reason)

    def _give_long_answers_room(self) -> None:
        """Keep more memory for answers that get long; where there is none, set tasks aside."""
        for task in list(self._intake.admitted):
            more = min(MORE_TOKENS, task.job.options.max_tokens - task.room)
            while task in self._intake.admitted and task.needs_room:
                other = self._limits.in_the_way(task, more, self._intake.admitted)
                if other is None:
                    task.grown = task.room + more
                else:
                    self._set_aside(other)

    def _set_aside(self, task: Task) -> None:
        """Store the K/V of a task, and have it wait until there is room again."""
        self._counts["set_aside"] += 1
        self._store(task)
        self._forget(task)
        task.set_aside()
        self._intake.set_aside(task)

    def _embed(self) -> None:
        """Embed the next piece of a text."""
        piece = self._limits.prefill_chunk_size if self._runner.batchable else None
        job = self._intake.next_embedding(piece)
        if job is not None and job.advance(self.model, piece):
            self._intake.embedded(job)

    def _compute_prompts(self) -> None:
        """Compute a piece of a prompt, or several short prompts."""
        room = self._limits.prefill_chunk_size
        least = -(-room // _FORWARDS)
        while self._prefill.tasks and room > 0:
            room -= max(self._compute_piece(self._prefill.next(), room), least)
            self._take_up()

    def _compute_piece(self, task: Task, room: int) -> int:
        """Compute the next piece of a prompt, of at most `room` tokens; returns how many they were."""
        try:
            computed, logits = self._prefill.compute(task, room, [*self._decoding.tasks, *self._prefill.tasks])
            self._sessions.enter(task)
            if task.left:
                return computed
            if task.resumed:
                self._prefill.tasks.remove(task)
                self._decoding.tasks.append(task)
                return computed
            self._begin(task)
            if not task.job.options.max_tokens:
                self._end(task, "length")
                return computed
        except StoreClosedError:
            self._runner.leave_store()
            task.cache, task.done, task.known = None, 0, None
            return 0
        except Exception as error:
            self._fail([task], error)
            return room
        self._prefill.tasks.remove(task)
        self._decoding.tasks.append(task)
        self._choose([task], logits)
        return computed

    def _begin(self, task: Task) -> None:
        report = task.begin(self.tokenizer)
        self._counts.update(
            prompt_tokens=report.prompt_tokens,
            cached_tokens=report.reused_tokens,
            computed_tokens=report.forwarded_tokens,
        )
        self._tiers.update(report.tier_tokens)
        self._sessions.begin(task)
        try:
            self._link(task)
        except Exception as error:
            self._failures.note("tell routers of a prompt", error)

    def _link(self, task: Task) -> None:
        """Tell `holdings` which chunks cover the text that the front of a cluster knows the prompt by."""
        job, cache = task.job, task.cache
        if job.text_keys and cache is not None and cache.root is not None:
            ids = np.asarray(job.ids, dtype=np.int64)
            row = RowToServe(cache.root, ids, Border(0, cache.root), self.store.chunker, stateful=False)
            # The first key names the session, where the request names one, and is of no piece.
            pieces = job.text_keys[job.session is not None :]
            self.holdings.link(pieces, row.borders[1:], len(ids))

    def _step(self) -> None:
        """Compute one more token of each answer; several of one that runs alone and has a draft or a prediction."""
        decoding = self._decoding
        try:
            alone = len(decoding.tasks) == 1 and not self._prefill.tasks
            ahead = self._ahead.round(decoding.tasks[0]) if alone else None
            for task, error in decoding.arrange(drafted=ahead is not None):
                self._fail([task], error)
            tasks = list(decoding.tasks)
            if not tasks:
                return
            if ahead is not None:
                self._run_ahead(tasks[0], ahead)
                return
            if (drafts := self._ahead.rows(decoding)) is not None:
                self._step_rows(tasks, drafts)
                return
        except Exception as error:
            self._fail_answers(error)
            return
        self._counts["steps"] += 1
        self._ahead.note_step(len(tasks))
        for together in decoding.groups:
            try:
                logits = decoding.step(together)
            except Exception as error:
                self._fail(together, error)
            else:
                self._choose(together, logits)

    def _step_rows(self, tasks: Sequence[Task], drafts: RowDrafts) -> None:
        """Compute one more token of each answer, and those of its drafts that are right."""
        before = [len(task.ids) for task in tasks]
        trees = drafts.draft([task.ids for task in tasks])
        columns = 1 + max(map(len, trees))
        if columns == 1:
            logits = self._decoding.step(tasks)
            self._counts["steps"] += 1
            self._choose(tasks, logits)
            said = [task.ids[at:] for task, at in zip(tasks, before, strict=True)]
            drafts.note(trees, [None] * len(tasks), said, timed=len(self._decoding.tasks) == len(tasks))
            return
        logits = self._decoding.check(trees)
        self._counts["steps"] += 1
        taken, ends, now = list[Taken | None](), list[FinishReason | Exception | None](), time.perf_counter()
        for task, tree, row in zip(tasks, trees, logits, strict=True):
            assert task.sampler is not None
            choosing = Choosing(task.sampler, partial(self._add, task, now=now))
            try:
                taken.append(choosing.take(tree, row[: 1 + len(tree)]))
                ends.append(choosing.reason)
            except Exception as error:
                taken.append(None)
                ends.append(error)
        self._decoding.keep([found.committed if found is not None else 1 for found in taken], columns)
        drafts.note(trees, taken, [task.ids[at:] for task, at in zip(tasks, before, strict=True)])
        for task, end in zip(tasks, ends, strict=True):
            if task.cache is None:
                continue
            if isinstance(end, Exception):
                self._fail([task], end)
            elif end is not None:
                self._end(task, end)

    def _run_ahead(self, task: Task, ahead: Round) -> None:
        reason = ahead(partial(self._add, task, now=time.perf_counter()))
        self._counts["steps"] += 1
        if reason is not None:
            self._end(task, reason)

    def _choose(self, tasks: Sequence[Task], logits: torch.Tensor) -> None:
        """Choose a token for each task from logits [tasks, vocab_size], and end the tasks that it ends."""
        try:
            chosen = choose_rows([task.sampler for task in tasks if task.sampler is not None], logits)
        except Exception as error:
            self._fail(tasks, error)
            return
        now = time.perf_counter()
        for task, choice in zip(tasks, chosen, strict=True):
            if task.cache is None:  # it has ended with a batch that could not let another one go
                continue
            try:
                if isinstance(choice, Exception):
                    raise choice
                reason = self._add(task, *choice, now)
            except Exception as error:
                self._fail([task], error)
                continue
            if reason is not None:
                self._end(task, reason)

    def _add(self, task: Task, token: int, logprob: TokenLogprob | None, now: float) -> FinishReason | None:
        self._counts["generated_tokens"] += 1
        return task.add(token, logprob, now)

    def _end(self, task: Task, reason: FinishReason) -> None:
        """Store the K/V of a task, make room for others, and tell its listener."""
        self._store(task)
        self._forget(task)
        self._intake.end(task, reason)

    def _store(self, task: Task) -> None:
        """Store the K/V of a task."""
        try:
            self._decoding.sync(task)
            self._hear()
            if task.cache is not None:
                if task.report is not None:
                    task.note_report()
                task.cache.store_tails()
                self._sessions.end(task)
                task.cache.repair_when_idle()
        except Exception:
            _log.exception("K/V of a text could not be stored.")

    def _fail(self, tasks: Sequence[Task], error: Exception) -> None:
        """End tasks whose forward has failed; nothing of what it has left behind is stored."""
        expected = isinstance(error, ConstraintError)
        if not expected:
            _log.error("A forward has failed.", exc_info=error)
        for task in tasks:
            self._forget(task)
            if expected:
                self._intake.end(task, "constraint", str(error))
            else:
                self._intake.end(task, "error", f"{type(error).__name__}: {error}")

    def _fail_answers(self, error: Exception) -> None:
        """End all answers: what their batch holds is no longer sure."""
        tasks = list(self._decoding.tasks)
        self._decoding.clear()
        self._fail(tasks, error)

    def _fail_all(self, error: Exception) -> None:
        """End all requests that were admitted, or else all others: the loop meets an error of nobody's once."""
        self._decoding.clear()
        self._prefill.tasks.clear()
        if tasks := list(self._intake.admitted) or self._intake.take_waiting():
            self._fail(tasks, error)
        else:
            self._intake.fail_embeddings(error)

    def _forget(self, task: Task) -> None:
        task.cache = None
        if task in self._prefill.tasks:
            self._prefill.tasks.remove(task)
        if task in self._decoding.tasks:
            try:
                self._decoding.remove(task)
            except Exception as error:  # whoever forgets this task tells it of its end
                self._decoding.tasks.remove(task)
                self._fail_answers(error)
