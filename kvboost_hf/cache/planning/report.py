"""Reports how much of a prompt was reused, where reuse ended, and why."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvboost_hf.cache.planning.chunks import Tokens, common_length, text_ids
from kvboost_hf.cache.planning.plan import Miss

LIVE = "live"  # where tokens were found that the cache itself holds
BATCH = "batch"  # where tokens were found that another row of the same batch has computed
_CONTEXT_TOKENS = 12
_CLOCK = re.compile(r"\d{1,4}[-/:]\d{1,2}([-/:.]\d{1,4})*")


class Detokenizer(Protocol):
    """A tokenizer, as far as a report needs one."""

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class MissReport:
    """The first token of a row that had to be computed although more of the prompt might have been reusable."""

    row: int
    at: int  # in row tokens
    before: Tokens  # a few prompt tokens up to there; images, sound and video are -1, here and below
    found: Tokens  # a few prompt tokens from there on
    expected: Tokens | None  # the tokens of the nearest stored chunk there, or None
    cause: str  # "cold" | "evicted" | "fingerprint" | "diverged" | "slow"


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """Counts for the last prompt that a cache saw. Tokens are counted over all rows, padding left out.

    Args:
        prompt_tokens: Tokens of the prompt.
        exact_tokens: Reused tokens that were taken from K/V with the same tokens, positions and history.
        moved_tokens: Reused tokens that were taken from K/V computed elsewhere.
        recomputed_tokens: Moved tokens that were computed again to repair them.
        forwarded_tokens: Tokens that went through the model for the prompt; where layers differ, their mean, rounded
            up.
        moved_by: How many of the moved tokens that the store served for this prompt moved by how many positions.
        layer_tokens: How many tokens of a prompt with moved tokens went through each layer; else empty.
        tier_tokens: Reused tokens by where they were found: `"live"` (still in this cache), `"batch"` (computed for
            another row of the same batch), `"ram"`, and the names of the store's other tiers.
        bypass_reason: Why nothing, or nothing more, of the prompt could be reused, or None.
        moved_reason: With mode `"blend"`, why nothing of the prompt could be moved, or None.
        misses: For each row, where reuse ended and why; empty where all was reused.
        audit_tokens: Tokens that were computed again, whole, to check the answer (`ReusePolicy.audit_rate`).
        audit_divergence: The largest difference of a logit that the check found, in standard deviations of the
            logits, or None without a check.
        row_tokens: `reused_tokens` of each row; empty if the store was not searched.
        dropped_reason: Why K/V that the cache itself held was neither used nor stored, or None.
        unstored_reason: Why some of its K/V was left out of the store, or None.
        repaired_tokens: Tokens that went through the model again after the prompt, so that K/V behind moved chunks
            becomes that of a plain forward (`ReusePolicy.progressive`).
        eager_reason: Why the last generate() call decodes without a graph, or None: it decodes in one, or there was no
            such call.
        start_reason: Why chats never begin with what `ChunkStore.warm` has computed, or not always; None if they do,
            and for all other prompts.
        riding_reason: Why moved tokens that are left as they are do not ride along with new ones, or None: they do, or
            none are left.
    """

    prompt_tokens: int = 0
    exact_tokens: int = 0
    moved_tokens: int = 0
    recomputed_tokens: int = 0
    forwarded_tokens: int = 0
    layer_tokens: tuple[int, ...] = ()
    tier_tokens: Mapping[str, int] = field(default_factory=dict)
    bypass_reason: str | None = None
    moved_reason: str | None = None
    misses: tuple[MissReport, ...] = ()
    audit_tokens: int = 0
    audit_divergence: float | None = None
    row_tokens: tuple[int, ...] = ()
    dropped_reason: str | None = None
    unstored_reason: str | None = None
    repaired_tokens: int = 0
    moved_by: Mapping[int, int] = field(default_factory=dict)
    eager_reason: str | None = None
    start_reason: str | None = None
    riding_reason: str | None = None

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        return self.exact_tokens + self.moved_tokens - self.recomputed_tokens

    @property
    def reuse_ratio(self) -> float:
        """`reused_tokens` as a share of `prompt_tokens`, 0.0 for an empty prompt."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __str__(self) -> str:
        text = (
            f"prompt {self.prompt_tokens} tokens, {self.reused_tokens} reused ({self.reuse_ratio:.0%}), "
            f"{self.forwarded_tokens} computed"
        )
        if self.moved_tokens:
            text += f", {self.moved_tokens} moved{_distances(self.moved_by)} ({self.recomputed_tokens} computed again)"
        if self.repaired_tokens:
            text += f", {self.repaired_tokens} repaired after the first token"
        tiers = ", ".join(f"{count} {tier}" for tier, count in self.tier_tokens.items() if count)
        if tiers:
            text += f" [{tiers}]"
        text = f"{text}; bypassed: {self.bypass_reason}" if self.bypass_reason else text
        return f"{text}; but {self.start_reason}" if self.start_reason else text

    def explain(self, tokenizer: Detokenizer | None = None) -> str:
        """Explain in words where reuse ended and why.

        Args:
            tokenizer: To show text in place of token ids, and to recognize retokenized text and timestamps.

        Example:
            >>> ReuseReport(prompt_tokens=40, exact_tokens=39, forwarded_tokens=1).explain()
            'prompt 40 tokens, 39 reused (98%), 1 computed\\nEverything that can be reused was.'
        """
        lines = [str(self)]
        if self.bypass_reason:
            lines.append(f"Nothing{' more' if self.reused_tokens else ''} was reused: {self.bypass_reason}.")
        elif not self.misses and not self.moved_tokens:
            lines.append("Everything that can be reused was." if self.prompt_tokens else "No prompt was seen yet.")
        if self.dropped_reason:
            lines.append(f"What the cache itself held was dropped: {self.dropped_reason}.")
        if self.unstored_reason:
            lines.append(f"Not all of it was stored: {self.unstored_reason}.")
        if self.moved_reason:
            lines.append(f"Nothing was moved: {self.moved_reason}.")
        elif self.moved_tokens:
            lines.append(
                f"{self.moved_tokens} tokens were computed elsewhere, or behind moved ones; {self.recomputed_tokens} "
                "of them were computed again."
            )
        if self.riding_reason:
            lines.append(f"None of the others are computed again along with new tokens: {self.riding_reason}.")
        lines += [_explain(miss, tokenizer) for miss in self.misses]
        return "\n".join(lines)


class Missed(NamedTuple):
    """The end of a row's walk through the store."""

    row: int
    tokens: Tokens  # all of the row
    miss: Miss
    evicted: bool  # the chunk that was wanted there had to make room
    other_fingerprint: bool  # the beginning of the row is stored for the model as it was before


@dataclass(slots=True)
class Tally:
    """Counts of the prompt under way."""

    prompt: int = 0
    live: int = 0
    tiers: Counter[str] = field(default_factory=Counter)  # not from this cache, moved ones included, by tier
    moved: int = 0
    recomputed: int = 0
    forwarded: int = 0  # in forwards without moved tokens
    layers: tuple[int, ...] = ()  # through each layer, in those with moved tokens
    bypass: str | None = None
    moved_reason: str | None = None
    misses: list[Missed] = field(default_factory=list)
    audit_tokens: int = 0
    audit_divergence: float | None = None
    rows: list[int] = field(default_factory=list)  # reused tokens of each row
    repaired: int = 0  # tokens computed again after the prompt
    dropped: str | None = None
    unstored: str | None = None
    moved_by: Counter[int] = field(default_factory=Counter)  # those that moved chunks served, by the distance

    @property
    def computed(self) -> int:
        """Tokens that went through the model for the prompt, the mean over layers."""
        return self.forwarded + math.ceil(sum(self.layers) / max(1, len(self.layers)))

    @property
    def stored(self) -> int:
        """Tokens from the store, and from other rows."""
        return sum(self.tiers.values())

    def report(self) -> ReuseReport:
        """The counts so far."""
        return ReuseReport(
            prompt_tokens=self.prompt,
            exact_tokens=self.live + self.stored - self.moved,
            moved_tokens=self.moved,
            recomputed_tokens=self.recomputed,
            forwarded_tokens=self.computed,
            layer_tokens=tuple(self.forwarded + tokens for tokens in self.layers),
            tier_tokens={"live": self.live, "ram": 0, **self.tiers},
            bypass_reason=self.bypass,
            moved_reason=self.moved_reason if not self.moved else None,  # it may be that of a part of the prompt
            misses=tuple(map(_miss_report, self.misses)),
            audit_tokens=self.audit_tokens,
            audit_divergence=self.audit_divergence,
            row_tokens=tuple(self.rows),
            dropped_reason=self.dropped,
            unstored_reason=self.unstored,
            repaired_tokens=self.repaired,
            moved_by=dict(self.moved_by),
        )


def _distances(moved_by: Mapping[int, int]) -> str:
    """Where moved tokens have gone, in a few words; empty if the store has served none."""
    shifts = sorted(moved_by)
    if not shifts:
        return ""
    if shifts == [0]:
        return " by 0"  # they stand where they stood, behind another text
    if len(shifts) <= 3:
        return " by " + " and ".join(f"{shift:+d}" for shift in shifts)
    return f" by {shifts[0]:+d} to {shifts[-1]:+d}"


def _miss_report(missed: Missed) -> MissReport:
    """Classify the end of a row's walk through the store."""
    row, tokens, miss, evicted, other_fingerprint = missed
    before = tokens[max(0, miss.at - _CONTEXT_TOKENS) : miss.at]
    found = tokens[miss.at : miss.at + _CONTEXT_TOKENS]
    expected: Tokens | None = None
    if miss.nearest is not None:
        stored = miss.nearest[common_length(miss.nearest, tokens[miss.border.at :]) :]
        expected = text_ids(stored[:_CONTEXT_TOKENS]) if len(stored) else None
    before, found = text_ids(before), text_ids(found)
    cause = "fingerprint" if other_fingerprint and miss.at == 0 else "cold"
    cause = "slow" if miss.is_slow else "diverged" if expected is not None else "evicted" if evicted else cause
    return MissReport(row, miss.at, before, found, expected, cause)


def _explain(miss: MissReport, tokenizer: Detokenizer | None) -> str:
    def show(ids: Tokens) -> str:
        text = [i for i in ids.tolist() if i >= 0]
        if not text:
            return "an image, sound or video"
        return repr(tokenizer.decode(text)) if tokenizer is not None else f"tokens {text}"

    where = f"Row {miss.row}, token {miss.at}: {show(miss.found)}"
    if miss.cause == "evicted":
        return f"{where} was stored once and has been evicted; a larger `max_bytes` would have kept it."
    if miss.cause == "slow":
        return f"{where} is stored in a lower tier, but takes longer to load than to compute."
    if miss.cause == "fingerprint":
        return f"{where} is stored, but for other weights, dtype or adapters of this model."
    if miss.expected is None:
        return f"{where} was never seen {'after what comes before it' if miss.at else 'at the beginning of a prompt'}."
    text = f"{where}, where a stored prompt has {show(miss.expected)}"
    if miss.found[0] < 0 and miss.expected[0] < 0:
        return f"Row {miss.row}, token {miss.at}: another image, sound or video than in a stored prompt."
    if tokenizer is None or min(miss.before.min(initial=0), miss.found.min(), miss.expected.min()) < 0:
        return f"{text}."
    before, found, expected = (tokenizer.decode(ids.tolist()) for ids in (miss.before, miss.found, miss.expected))
    if (shared := min(len(found), len(expected))) and found[:shared] == expected[:shared]:
        return f"{text}: the same text in other tokens (text that was decoded and tokenized again)."
    if _crosses(_CLOCK, before, found) and _crosses(_CLOCK, before, expected):
        return f"{text}: looks like a date or time; move it behind what should be reused."
    return f"{text}."


def _crosses(pattern: re.Pattern[str], before: str, after: str) -> bool:
    """Whether `pattern` matches across the border of the two texts, or at the start of the second."""
    return any(m.end() > len(before) and m.start() <= len(before) + 2 for m in pattern.finditer(before + after))
