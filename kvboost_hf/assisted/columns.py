"""How many columns of drafts a pass over several rows carries, by measured times.

All rows of a pass have as many columns, whoever has a draft. So a pass with drafts takes longer for all, and helps the
rows whose drafts are right. `Account` compares what it took with what plain decoding takes.
"""

from collections.abc import Sequence
from itertools import accumulate

from kvboost_hf.assisted.learner import LineFit, Mean

_SHARE = 0.01  # of the time of plain decoding, that may be lost to drafts; and of what is still to come, at most
_AT_ONCE = 0.5  # passes of plain decoding
_AHEAD = 16  # tokens by which a row is so far ahead of the last one that its drafts save no time
_WIDER = 1.1  # passes with drafts over plain ones, before any is measured
_FEW = 8  # tokens of a row that a draft takes in by the way


class PassTimes:
    """Learns how long passes take: plain ones by their rows, those with drafts by their tokens."""

    def __init__(self) -> None:
        self._plain: dict[int, Mean] = {}
        self._wide: dict[int, Mean] = {}
        self._line = LineFit()
        self._most_per_token = float("inf")
        self._drafting = Mean()  # seconds for each row
        self._taking_in = Mean()  # seconds for each token of a text that drafts take in

    def learn_prompt(self, tokens: int, seconds: float) -> None:
        """A pass over prompts has computed so many tokens: another token takes no longer than one of these."""
        self._most_per_token = min(self._most_per_token, seconds / max(tokens, 1))

    def learn(self, rows: int, columns: int, seconds: float) -> None:
        """A pass had so many columns, one of which is no draft; none for a pass of plain decoding."""
        if not columns:
            self._plain.setdefault(rows, Mean()).learn(seconds)
        else:
            self._wide.setdefault(rows * columns, Mean()).learn(seconds)
            self._line.learn(rows * columns, seconds)

    def learn_drafting(self, behind: Sequence[int], seconds: float) -> None:
        """Rows were drafted for, whose drafts have taken in so many tokens each."""
        if tokens := _beyond(behind):
            known = len(behind) * self._drafting.value
            self._taking_in.learn(max(seconds - known, 0.0) / tokens)
        elif behind:
            self._drafting.learn(seconds / len(behind))

    def drafting(self, drafts: Sequence[tuple[float, int]], plain: float) -> float:
        """Seconds of drafting for rows, before any was measured by their shares of a pass.

        Args:
            drafts: For each row, `Drafter.share`, and `Drafter.behind` of its text.
            plain: Seconds of a pass.
        """
        first = max((share for share, _ in drafts), default=0.0)
        each = self._drafting.value if self._drafting.weight else plain * first
        least = self._most_per_token if self._most_per_token < float("inf") else 0.0
        taking_in = self._taking_in.value if self._taking_in.weight else first * least
        return len(drafts) * each + _beyond([behind for _, behind in drafts]) * taking_in

    def plain(self, rows: int) -> float | None:
        """Seconds of a pass of plain decoding over so many rows; None if there was none."""
        return found.value if (found := self._plain.get(rows)) is not None else None

    def wide(self, rows: int, columns: int) -> float:
        """Seconds of a pass with so many columns, estimated where there was none; `plain` must be known."""
        tokens, plain = rows * columns, self.plain(rows)
        assert plain is not None
        if (found := self._wide.get(tokens)) is not None:
            return found.value
        least = max((size for size in self._wide if size < tokens), default=0)
        near, at = (self._wide[least].value, least) if least > rows else (_WIDER * plain, rows)
        slope = self._line.value if len(self._wide) > 1 else min(plain / rows, self._most_per_token)
        return max(near, plain) + slope * (tokens - at)


class Account:
    """Weighs one answer's passes with drafts against plain decoding, so that drafts cost at most 2% of its time.

    What drafts may lose is 1% of the time that plain decoding would have taken so far, as much of what is still to
    come but no more than half a pass, and what they have gained. Plain decoding of the rows takes as many passes as
    the longest one has tokens: a token saves a pass where it brings the last row forward.

    Args:
        times: The measured times of passes.
        rows: Number of rows.
        room: Tokens that the answer may have.
        most_passes: Passes of plain decoding that may be lost at once, however much was gained before.
    """

    def __init__(self, times: PassTimes, rows: int, room: int, *, most_passes: float = float("inf")) -> None:
        self._most_passes = most_passes
        self._times, self._rows = times, rows
        self._ahead_of_time = min(_AT_ONCE, _SHARE * room)
        self._saved = self._plain_s = 0.0

    @property
    def spare_s(self) -> float:
        """Seconds that may be lost now."""
        plain = self._times.plain(self._rows)
        if plain is None:
            return 0.0
        return min(self._saved + _SHARE * self._plain_s + self._ahead_of_time * plain, self._most_passes * plain)

    def may_draft(self, drafts: Sequence[tuple[float, int]] = ()) -> bool:
        """Whether there is time for drafting, which is lost if nothing comes of it.

        Args:
            drafts: For each row that is to have drafts, `Drafter.share`, and `Drafter.behind` of its text.
        """
        plain = self._times.plain(self._rows)
        return plain is not None and self._times.drafting(drafts, plain) <= self.spare_s

    def columns(self, chances: Sequence[Sequence[float]], lengths: Sequence[int]) -> int:
        """How many columns of drafts the next pass is to have: as many as give most tokens a second.

        Args:
            chances: For each row that goes on, those of its drafted tokens, the likeliest first.
            lengths: Tokens of these rows.
        """
        plain = self._times.plain(self._rows)
        if plain is None:
            return 0
        last = min(lengths)
        counted = [
            list(accumulate(row)) for row, length in zip(chances, lengths, strict=True) if length <= last + _AHEAD
        ]
        best, speed, spare = 0, 1 / plain, self.spare_s
        for count in range(1, max(map(len, counted)) + 1):
            seconds = self._times.wide(self._rows, count + 1)
            if seconds - plain > spare:
                break
            gained = sum(row[min(count, len(row)) - 1] for row in counted if row) / len(counted)
            if (1 + gained) / seconds > speed:
                best, speed = count, (1 + gained) / seconds
        return best

    def note(self, columns: int, forward: float, draft_s: float, pass_s: float, behind: Sequence[int] = ()) -> None:
        """Note a round.

        Args:
            columns: How many the pass had; none for one of plain decoding.
            forward: Tokens by which the last row has come forward, or, where rows do not wait for each other, the mean
                of all.
            draft_s: Seconds of drafting.
            pass_s: Seconds of the pass.
            behind: For each row with drafts, the tokens that these have taken in.
        """
        self._times.learn(self._rows, columns, pass_s)
        self._times.learn_drafting(behind, draft_s)
        plain = self._times.plain(self._rows)
        if plain is None:
            return
        self._plain_s += plain * forward
        self._saved += (plain * forward - pass_s if columns else 0.0) - draft_s


def _beyond(behind: Sequence[int]) -> int:
    """Tokens to take in, of rows that have more of them than come with a round."""
    return sum(tokens for tokens in behind if tokens > _FEW)
