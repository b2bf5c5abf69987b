"""`Task`: a job that the engine has taken, from the queue to its end, and `SessionRecord`: a session's memory."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvboost_hf.cache.live.ledger import KnownRow
from kvboost_hf.cache.planning.chunks import Chunker, Tokens, digest
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.config import Progressive
from kvboost_hf.server.engine.belongings import Beginnings, Belongings
from kvboost_hf.server.generation.answer import Sampler, TextStream, score
from kvboost_hf.server.generation.speculation import AnswerDrafts, PredictedText
from kvboost_hf.server.jobs import (
    FIRST_TOKENS,
    Finished,
    FinishReason,
    Job,
    JobEvent,
    Keep,
    Listener,
    Progress,
    TokenLogprob,
)

_log = logging.getLogger("kvboost_hf.server")
_MOST_HEADS = 64
_MOST_PIECES = 256  # whose keys are remembered
_ID_BYTES = 12
MORE_TOKENS = 256  # of a long answer, that memory is kept for at a time
_SPARE_TOKENS = 64  # more than one forward adds


@dataclass(slots=True, eq=False)
class SessionRecord:
    """A session."""

    id: str  # the name of the session, or a hash of its first chunk
    client: bytes  # whose it is
    first_seen: float  # when its first request ran
    last_used: float  # when its last request ran
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    keep: Keep | None = None  # what to pin of each of its prompts, as was asked afterwards
    # The priority of the session's pins, as was asked afterwards; None for that of each job.
    priority: int | None = None
    roots: set[bytes] = field(default_factory=set)  # where its K/V begins
    # The first chunks of its prompts, by their bytes; the newest 64.
    heads: dict[bytes, Tokens] = field(default_factory=dict)
    _pieces: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)
    _has_more_pieces: bool = False

    def note_text(self, root: bytes, ids: Sequence[int], chunker: Chunker, pieces: frozenset[bytes]) -> bool:
        """Note that K/V of a text has been stored, and the keys of its pieces that are found by content.

        Tells whether others need to know.
        """
        head = first_chunk(ids, chunker)
        new = root not in self.roots or head.tobytes() not in self.heads or bool(pieces and not self.has_pieces)
        self.note(root, head)
        self._pieces |= dict.fromkeys(pieces, root)
        while len(self._pieces) > _MOST_PIECES:
            self._pieces.popitem(last=False)
            self._has_more_pieces = True
        return new

    def note(self, root: bytes, head: Tokens, *, pieces: bool = False) -> None:
        """Note how prompts begin, and whether there are pieces whose keys are not known."""
        self.roots.add(root)
        self.heads.setdefault(head.tobytes(), head.copy())
        while len(self.heads) > _MOST_HEADS:
            del self.heads[next(iter(self.heads))]
        self._has_more_pieces = self._has_more_pieces or pieces

    @property
    def has_pieces(self) -> bool:
        """Whether something of it is found by its content."""
        return bool(self._pieces) or self._has_more_pieces

    def add_to(self, heads: Beginnings) -> None:
        """Add how its prompts begin."""
        for head in self.heads.values():
            for root in self.roots:
                heads.add(root, head, self.id)

    @property
    def belongings(self) -> Belongings:
        """The part of the store that belongs to the session."""
        return Belongings(self.id, pieces=dict(self._pieces), all_pieces=self._has_more_pieces)


@dataclass(slots=True)
class RowRepair:
    """How far the repair of a row is, whose moved K/V is made exact along with the steps of a batch.

        step    row 0   [ tainted tokens 40 to 55 | new token ]      a part of each row that has some, in order
                row 1   [ new token, as often     | new token ]      the others are filled up

    The batch's copy of the K/V is repaired. When the row leaves, its own cache takes over what is exact.
    """

    start: int  # the first tainted token when the row joined
    progressive: Progressive  # how many tokens a step takes along: a number, or `"ride"`
    at: int = -1  # the first tainted token now. All behind it are tainted, too
    count: int = 0  # tokens that were computed again
    done: bool = False  # no token is tainted any more, and new ones are exact

    def __post_init__(self) -> None:
        self.at = self.start

    def next(self, length: int, free: int) -> tuple[int, int]:
        """The tokens [start, stop) that the next step computes again, in a row of `length`, and `free` at most."""
        if self.done:
            return length, length
        most = free if self.progressive == "ride" else int(self.progressive)
        return self.at, min(self.at + most, length)

    def advance(self, stop: int, length: int) -> None:
        """A step has computed all tokens before `stop` again, in a row that had `length` before it."""
        if not self.done:
            self.count += stop - self.at
            self.at, self.done = stop, stop == length

    def exact(self, length: int) -> int:
        """How many first tokens are exact, of `length`."""
        return length if self.done else self.at


@dataclass(slots=True, eq=False)
class Task:
    """The state of one job. It is also the job's `Ticket`."""

    job: Job
    listener: Listener
    submitted: float  # all times are of time.perf_counter()
    cancelled: bool = False
    cache: ChunkReuseCache | None = None
    done: int = 0  # tokens of the prompt that were computed or reused
    scored: int = 0  # tokens of the prompt whose log probabilities were reported
    spans: list[tuple[int, int]] = field(default_factory=list)  # of the prompt, that moved K/V may serve
    known: KnownRow | None = None  # what the store had of the prompt when it was last looked up
    told_known: bool = False  # whether the listener has been told how much that is, if it asks
    passed: int = 0  # pieces of other prompts since the last one of this
    ids: list[int] = field(default_factory=list)  # of the answer
    sampler: Sampler | None = None
    drafted: AnswerDrafts | None = None  # made when it first runs alone
    predicted: PredictedText | None = None  # likewise
    text: TextStream | None = None
    joined: int = 0  # tokens that its own cache holds while it is in the batch
    repair: RowRepair | None = None  # of the tokens that moved chunks have left, while it is in the batch
    report: ReuseReport | None = None
    started: float | None = None
    pinned: bool | None = None
    session: SessionRecord | None = None
    first: float | None = None  # when its first token was on the host
    grown: int = 0  # tokens of the answer that memory is kept for, if more than for any
    resumed: bool = False  # whether it was set aside after its first token
    said: int = 0  # tokens of the answer that were computed before it was set aside, and are computed again
    riding_reason: str | None = None  # why the batch does not repair moved tokens along with new ones
    unwanted: bool = False  # whether its session was dropped, so that nothing of it is kept

    def cancel(self) -> None:
        """End the job before the engine's next forward. Any thread may call it."""
        self.cancelled = True

    @property
    def client(self) -> bytes:
        """Who asks."""
        return self.job.client

    @property
    def reserved(self) -> int:
        """Tokens of prompt and answer that memory is kept for."""
        return len(self.job.ids) + min(self.job.options.max_tokens, self.room)

    @property
    def room(self) -> int:
        """Tokens of the answer that memory is kept for, and more where it may not have as many."""
        return max(FIRST_TOKENS, self.grown)

    @property
    def needs_room(self) -> bool:
        """Whether the answer is about to get longer than what memory is kept for."""
        return len(self.ids) + _SPARE_TOKENS > self.room and self.room < self.job.options.max_tokens

    @property
    def to_compute(self) -> Sequence[int]:
        """Token ids that the model computes before the next token is chosen: the prompt, and the answer so far."""
        return [*self.job.ids, *self.ids[: self.said]] if self.said else self.job.ids

    @property
    def left(self) -> int:
        """How many of `to_compute` are not computed yet, as far as is known."""
        return len(self.job.ids) + self.said - max(self.done, self.known.filled if self.known is not None else 0)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer that the model has computed, once the prompt is: all but the last one."""
        return len(self.job.ids) + len(self.ids) - 1

    @property
    def must_tell_known(self) -> bool:
        """Whether the listener waits to be told how much of the prompt is stored."""
        return self.job.tells_known and not self.told_known

    def tell_known(self) -> None:
        """Tell the listener how much of the prompt is stored, after it was looked up, if it waits for that."""
        if self.must_tell_known and self.known is not None:
            self.told_known = True
            self._tell(Progress("", 0, known=self.known.filled))

    def set_aside(self) -> None:
        """Let go of all K/V. When the task goes on, its text is loaded from the store, or computed again."""
        self.cache = self.drafted = None
        self.done, self.known, self.spans = 0, None, []
        self.resumed, self.said = self.sampler is not None, max(len(self.ids) - 1, 0)
        self.grown = len(self.ids) + FIRST_TOKENS

    def must_end(self, now: float) -> FinishReason | None:
        """Why the job ends before its next forward: `"cancelled"`, `"timeout"` or None."""
        if self.cancelled:
            return "cancelled"
        limit = self.job.timeout_s
        return "timeout" if limit is not None and now - self.submitted > limit else None

    def score_prompt(self, logits: torch.Tensor) -> None:
        """Report the log probabilities of the tokens that follow those whose logits these are, from `done` on."""
        ids, start = self.job.ids, self.done + 1
        found = [] if self.scored else [TokenLogprob(ids[0], None)]
        first = max(start, self.scored)  # the prompt was begun anew if its store was closed
        following = ids[first : start + len(logits)]
        found += score(logits[first - start :][: len(following)], following, self.job.options.logprobs or 0)
        self.scored = first + len(following)
        self._tell(Progress("", 0, tuple(found)))

    def begin(self, tokenizer: Any) -> ReuseReport:
        """Start the answer, after the prompt was computed; returns what was reused for the prompt."""
        assert self.cache is not None
        self.note_report()
        self.sampler = Sampler(self.job.options, self.job.ids, self.job.ends)
        self.text = TextStream(
            tokenizer,
            self.job.stop,
            self.job.ids,
            skip_special_tokens=self.job.skip_special_tokens,
            include_stop=self.job.include_stop,
            reasoning=self.job.reasoning,
        )
        assert self.report is not None
        return self.report

    def note_report(self) -> None:
        """Take the counts of the prompt from the cache; those of a repair grow after the prompt."""
        if self.cache is not None and not self.resumed:  # a later cache has counts of another text
            self.report = self.cache.report

    def add(self, token: int, logprob: TokenLogprob | None, now: float) -> FinishReason | None:
        """Append a token to the answer and tell the listener; returns why the answer ends with it, or None."""
        assert self.text is not None
        self.ids.append(token)
        self.first = self.first or now
        options = self.job.options
        may_stop = len(self.ids) > options.min_tokens
        reason: FinishReason | None = None
        if token in self.job.ends:
            reason, new = "stop", self.text.push(token) if self.job.include_stop else ""
            new += self.text.finish()
        else:
            new = self.text.push(token, may_stop=may_stop)
            constraint = options.constraint
            if self.text.stopped or (constraint is not None and constraint.finished):
                reason = "stop"
            elif len(self.ids) >= options.max_tokens:
                reason = "length"
            if reason is not None:
                new += self.text.finish(may_stop=may_stop)
        self._tell(Progress(new, 1, () if logprob is None else (logprob,)))
        return reason

    def finish(self, reason: FinishReason, error: str | None, now: float) -> None:
        """Tell the listener that the job has ended."""
        report, predicted = self.report or ReuseReport(), self.predicted
        reasons = {"moved_reason": report.moved_reason, "riding_reason": self.riding_reason or report.riding_reason}
        accepted, drafted = (predicted.accepted, predicted.drafted) if predicted is not None else (0, 0)
        self._tell(
            Finished(
                reason=reason,
                prompt_tokens=len(self.job.ids),
                completion_tokens=len(self.ids),
                cached_tokens=report.reused_tokens,
                moved_tokens=report.moved_tokens - report.recomputed_tokens,
                repaired_tokens=report.recomputed_tokens + report.repaired_tokens,
                computed_tokens=report.forwarded_tokens + report.repaired_tokens,
                tiers=dict(report.tier_tokens),
                queue_s=(self.started or now) - self.submitted,
                ttft_s=self.first - self.submitted if self.first is not None else None,
                total_s=now - self.submitted,
                error=error,
                stop=self.text.stop if self.text is not None else None,
                pinned=self.pinned,
                accepted_prediction=accepted if self.job.prediction else None,
                rejected_prediction=drafted - accepted if self.job.prediction else None,
                ids=tuple(self.ids),
                reasons={name: why for name, why in reasons.items() if why is not None},
            )
        )

    def _tell(self, event: JobEvent) -> None:
        try:
            self.listener(event)
        except Exception:  # nobody listens any more
            self.cancelled = True
            _log.exception("A listener has failed.")


def first_chunk(ids: Sequence[int], chunker: Chunker) -> Tokens:
    """The tokens of the first chunk of a prompt; all of them, where it is too short to tell where that ends."""
    tokens = np.asarray(ids, dtype=np.int64)
    return tokens[: chunker.next_cut(tokens, 0)]


def session_id(job: Job, chunker: Chunker) -> str:
    """The name of a job's session, or a hash of its first chunk that says nothing to those without its salt."""
    if job.session is not None:
        return job.session
    return digest(b"session", job.salt, first_chunk(job.ids, chunker).tobytes(), size=_ID_BYTES).hex()
