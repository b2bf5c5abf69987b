"""docs/composition.md: what goes with what, from the table of limits that the tests hold to."""

from pathlib import Path

from tests.composition.covering import covering_cells
from tests.composition.factors import CODES, FACTORS, LIMITS, MOVING, Limit, Value, all_pairs

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"

_TITLES = {
    "model": "model",
    "reuse": "reuse",
    "repair": "moved chunks",
    "codec": "codec of the store",
    "live": "live quantization",
    "attention": "attention",
    "weights": "weights",
    "assistant": "drafts",
    "rows": "rows",
    "decoding": "decoding",
    "buffers": "buffers",
}
_WORDS = {
    ("model", "llama"): "Llama (grouped heads)",
    ("model", "gemma2"): "Gemma 2 (windows, softcap)",
    ("model", "qwen3_next"): "Qwen3-Next (states)",
    ("model", "deepseek_v3"): "DeepSeek-V3 (latent attention)",
    ("reuse", "none"): "without a cache",
    ("reuse", "live"): "the cache of the last turn",
    ("reuse", "store"): "a store in memory",
    ("reuse", "disk"): "a store on disk, opened anew",
    ("repair", "exact"): "none",
    ("codec", "raw"): "`raw`",
    ("live", "exact"): "none",
    ("weights", "streamed"): "streamed layers",
    ("weights", "streamed AWQ"): "streamed AWQ layers",
    ("assistant", "none"): "none",
    ("assistant", "draft"): "`load_assistant`",
    ("assistant", "lookup"): "`lookup_assistant`",
    ("assistant", "trees"): "`TreeDecoding`",
    ("assistant", "heads"): "`TreeDecoding` with EAGLE-3 heads",
    ("rows", "one"): "one row",
    ("rows", "padded"): "padded rows",
    ("rows", "samples"): "`num_return_sequences`",
    ("rows", "beams"): "beams",
    ("buffers", "static"): "`max_cache_len`",
    **{(name, value): f"`{value}`" for name in ("repair", "codec", "attention") for value in FACTORS[name][1:]},
    ("attention", "eager"): "`eager`",
}
_LOSES = {
    **{("repair", value): "may differ" for value in MOVING},
    **{("codec", value): "may differ, but after the last turn" for value in FACTORS["codec"][1:]},
    **{("live", value): "may differ" for value in CODES},
}
_OUTCOMES = {
    "refused": "refused: `{says}`",
    "bypassed": "plain answer, and the report says: `{says}`",
    "nothing": "nothing: the answer is the same without",
}

_INTRODUCTION = """\
# What goes with what

<!-- Written by `python -m tests.composition --write`. -->

**Who needs this:** you want to combine two options, such as a codec with drafts. Nearly all go together. [The
table](#what-does-not-go-together) has those that do not, with what happens: an error, or a plain answer whose report
says why.

All of this is tested: each of {pairs} pairs of choices that go together meets in one of {cells} calls of `generate()`
on tiny models, whose tokens, logits and numbers of computed tokens must be right. The other {limits} pairs are in the
table, and each of them is tried, too.

## What can be combined

{choices}

Answers are those of plain `generate()`, except where a choice says that they may differ.

## What does not go together

"""
_OUTSIDE = """
## Where answers may differ although each part is exact

- With [live quantization](quantization.md), drafts change what is computed in one pass, and tokens of one pass attend
  to each other exactly.
- With `repair="query"`, the end of the prompt that is asked has the first drafts in it, so that other tokens may be
  computed again.
- Sampling with chains of drafts (`load_assistant`, `lookup_assistant`, prompt lookup) takes other random numbers than
  sampling without: the distribution is the same, the answer of one seed is not. Nor is it with `TreeDecoding` for
  several rows, of which each has random numbers of its own; for one row it is.
- A codec changes nothing that comes from the cache of the last turn, unless that cache has to go back, and cannot:
  states, and windows that have moved on, then come from the store.

Compiled decoding is tested with `max_cache_len` [elsewhere](reuse.md), and architectures have [a table of their
own](architectures.md).
"""


def page() -> str:
    """The page."""
    cells = covering_cells(LIMITS)
    listed = {name: ", ".join(_choice((name, value)) for value in values) for name, values in FACTORS.items()}
    choices = [f"- *{_TITLES[name]}*: {told}" for name, told in listed.items()]
    text = _INTRODUCTION.format(
        cells=len(cells), choices="\n".join(choices), pairs=len(all_pairs()) - len(LIMITS), limits=len(LIMITS)
    )
    return text + _rows([["this", "with this", "what happens", "why"], ["---"] * 4, *_limits()]) + _OUTSIDE


def _limits() -> list[list[str]]:
    """A row for each limit, with all values on either side that share it."""
    found: dict[tuple[str, str, Limit], tuple[dict[str, None], dict[str, None]]] = {}
    for (one, other), limit in LIMITS.items():
        sides = found.setdefault((one[0], other[0], limit), ({}, {}))
        for side, value in zip(sides, (one, other), strict=True):
            side[_word(value)] = None
    alike: dict[tuple[str, str, str], list[str]] = {}  # what goes not with one value, for the same reason
    for (factor, second, limit), sides in found.items():
        this, that = (
            f"{_TITLES[name]}: {', '.join(side)}" for name, side in zip((factor, second), sides, strict=True)
        )
        outcome = _OUTCOMES[limit.outcome].format(says=limit.says.replace("`", ""))
        alike.setdefault((this, outcome, limit.why), []).append(that)
    return [[this, "; ".join(those), outcome, why] for (this, outcome, why), those in alike.items()]


def _choice(value: Value) -> str:
    return f"{_word(value)} ({_LOSES[value]})" if value in _LOSES else _word(value)


def _word(value: Value) -> str:
    return _WORDS.get(value, value[1])


def _rows(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
