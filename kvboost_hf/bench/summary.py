"""Summarizes the rows of each arm in each workload."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from kvboost_hf.bench.arms import PLAIN
from kvboost_hf.bench.run import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One arm in one workload, over all counted rounds.

    Args:
        workload: Its name.
        arm: Its name.
        ttft_ms: Time to the first token: lower quartile, median, upper quartile.
        total_ms: Median time of an answer.
        speed_up: Median, over prompts and rounds, of plain time to the first token over the arm's, of the same prompt
            in the same round.
        prompt_tokens: Of all prompts of a round together, as are the next three.
        prefilled: Tokens that went through the model before the first ones of the answers were there.
        forwarded: Tokens that went through the model.
        reused: Tokens of prompts that were not computed; None where the arm does not tell.
        prompts: How many there are in a round.
        same: Prompts with the tokens of plain generate(), in every round.
        right: Prompts with a right answer, in every round; None where right answers are not known.
        store_bytes: Bytes that are kept at the end of a round; None where the arm does not tell.
    """

    workload: str
    arm: str
    ttft_ms: tuple[float, float, float]
    total_ms: float
    speed_up: float
    prompt_tokens: int
    prefilled: int
    forwarded: int
    reused: int | None
    prompts: int
    same: int
    right: int | None
    store_bytes: int | None


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """One summary for each arm in each workload, in the order of the rows.

    Counts are those of the first round; they are the same in all of them, but for `restart`, where K/V is read or
    computed, whichever seems faster.
    """
    plain = {(r.workload, r.round, r.prompt): r.served.ttft_ms for r in rows if r.arm == PLAIN.name}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.workload, row.arm), []).append(row)
    return [_summary(group, plain) for group in groups.values()]


def _summary(rows: Sequence[Row], plain: dict[tuple[str, int, int], float]) -> Summary:
    asked = {row.prompt for row in rows}
    first = [row for row in rows if row.round == rows[0].round]
    ttft = [row.served.ttft_ms for row in rows]
    low, middle, high = quantiles(ttft, n=4, method="inclusive") if len(ttft) > 1 else 3 * ttft
    reused = [row.served.reused for row in first if row.served.reused is not None]
    return Summary(
        workload=rows[0].workload,
        arm=rows[0].arm,
        ttft_ms=(low, middle, high),
        total_ms=median(row.served.total_ms for row in rows),
        speed_up=median(plain[row.workload, row.round, row.prompt] / row.served.ttft_ms for row in rows),
        prompt_tokens=sum(row.prompt_tokens for row in first),
        prefilled=sum(row.served.prefilled for row in first),
        forwarded=sum(row.served.forwarded for row in first),
        reused=sum(reused) if len(reused) == len(first) else None,
        prompts=len(first),
        same=len(asked - {row.prompt for row in rows if not row.same}),
        right=None
        if None in {row.right for row in rows}
        else len(asked - {row.prompt for row in rows if not row.right}),
        store_bytes=first[-1].served.store_bytes,
    )
