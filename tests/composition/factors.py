"""What can be combined in one call of `generate()`, and what cannot, with the reason."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One call of `generate()`: a value of each factor. The defaults go with everything but `samples`."""

    model: str = "llama"
    reuse: str = "store"
    repair: str = "exact"
    codec: str = "raw"
    live: str = "exact"
    attention: str = "eager"
    weights: str = "resident"
    assistant: str = "none"
    rows: str = "one"
    decoding: str = "greedy"
    buffers: str = "growing"

    def __str__(self) -> str:
        given = [f"{name}={value}" for name, value in self.values if value != getattr(Cell(), name)]
        return ",".join(given).replace(" ", "_") or "base"

    @property
    def values(self) -> list["Value"]:
        """Of all factors, in order."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    @property
    def pairs(self) -> set["Pair"]:
        """Any two of them."""
        return set(combinations(self.values, 2))

    @property
    def loses(self) -> bool:
        """Whether the answer may differ from that of plain `generate()`."""
        return (self.codec != "raw" and self.is_stored) or self.live != "exact" or self.repair != "exact"

    @property
    def is_stored(self) -> bool:
        """Whether the history comes from the store: states cannot go back to where a prompt parts from an answer."""
        return self.reuse in ("store", "disk") or self.model == "qwen3_next" or self.repair != "exact"


Value = tuple[str, str]  # a factor and one of its values
Pair = tuple[Value, Value]  # in the order of the factors

FACTORS: dict[str, tuple[str, ...]] = {
    "model": ("llama", "gemma2", "qwen3_next", "deepseek_v3"),
    "reuse": ("none", "live", "store", "disk"),
    "repair": ("exact", "first_k", "cacheblend", "query"),
    "codec": ("raw", "int8", "int4", "turboquant"),
    "live": ("exact", "int8", "int4"),
    "attention": ("eager", "sdpa", "kvboost_fa2"),
    "weights": ("resident", "AWQ", "streamed", "streamed AWQ"),
    "assistant": ("none", "draft", "lookup", "trees", "heads", "prompt lookup"),
    "rows": ("one", "padded", "samples", "beams"),
    "decoding": ("greedy", "sampled"),
    "buffers": ("growing", "static"),
}
MOVING = tuple(name for name in FACTORS["repair"] if name != "exact")
CODES = tuple(name for name in FACTORS["live"] if name != "exact")
CHAINS = ("draft", "lookup", "prompt lookup")
TREES = ("trees", "heads")

Outcome = Literal["refused", "bypassed", "nothing"]


@dataclass(frozen=True, slots=True)
class Limit:
    """Two values that do not go together.

    Args:
        outcome: `"refused"`: a ValueError. `"bypassed"`: the plain answer, with nothing reused or nothing moved, and
            the report says why. `"nothing"`: one of the two is a matter of what the other leaves out.
        says: A part of the message.
        why: In plain words.
    """

    outcome: Outcome
    says: str
    why: str


def pair(one: Value, other: Value) -> Pair:
    """The two in the order of the factors."""
    order = list(FACTORS)
    return (one, other) if order.index(one[0]) < order.index(other[0]) else (other, one)


def all_pairs() -> list[Pair]:
    """Any two values of two factors."""
    return [
        ((one, a), (other, b)) for one, other in combinations(FACTORS, 2) for a in FACTORS[one] for b in FACTORS[other]
    ]


def cell_of(both: Pair) -> Cell:
    """The two values, and the default of every other factor."""
    cell = replace(Cell(), **dict(both))
    return replace(cell, decoding="sampled") if cell.rows == "samples" and ("decoding", "greedy") not in both else cell


def _limits(one: str, values: Sequence[str], other: str, others: Sequence[str], limit: Limit) -> dict[Pair, Limit]:
    return {pair((one, a), (other, b)): limit for a in values for b in others}


_NO_CACHE = Limit("nothing", "", "It is a setting of the cache, and no cache is passed.")
_STATES = Limit("refused", "not supported with stateful models", "States cannot be taken back; transformers refuses.")
_ONE_ROW = Limit("refused", "only supported for batch_size = 1", "transformers drafts for one row.")
_ONE_ANSWER = Limit("refused", "num_return_sequences has to be 1", "transformers drafts for one row.")
_TREE_BEAMS = Limit("refused", "`num_beams` must be 1 with trees", "Beams change rows at each token.")

LIMITS: dict[Pair, Limit] = {
    **_limits("reuse", ["none"], "repair", MOVING, _NO_CACHE),
    **_limits("reuse", ["none"], "codec", FACTORS["codec"][1:], _NO_CACHE),
    **_limits("reuse", ["none"], "live", CODES, _NO_CACHE),
    **_limits("reuse", ["none"], "buffers", ["static"], _NO_CACHE),
    **_limits(
        "model",
        ["gemma2"],
        "attention",
        ["sdpa"],
        Limit("refused", "does not support an attention implementation", "SDPA has no softcap; transformers refuses."),
    ),
    **_limits(
        "model",
        ["qwen3_next"],
        "repair",
        MOVING,
        Limit("bypassed", "only keys and values can be moved", "A state belongs to all the text before it."),
    ),
    **_limits("model", ["qwen3_next"], "assistant", CHAINS, _STATES),
    **_limits(
        "model",
        ["qwen3_next"],
        "assistant",
        ["heads"],
        Limit(
            "refused", "drafts for no model with states", "States cannot be taken back by what asks heads for drafts."
        ),
    ),
    **_limits(
        "repair",
        MOVING,
        "assistant",
        ["heads"],
        Limit("bypassed", "the call asks for hidden states", "Those of moved chunks belong to another text."),
    ),
    **_limits(
        "live",
        CODES,
        "assistant",
        ["heads"],
        Limit("bypassed", "`live_quant` keeps none", "Hidden states are kept as they are, or not at all."),
    ),
    **_limits(
        "repair",
        MOVING,
        "live",
        CODES,
        Limit("bypassed", "the cache holds codes (live_quant)", "Moved keys are rotated, and codes cannot be."),
    ),
    **_limits(
        "repair",
        MOVING,
        "buffers",
        ["static"],
        Limit("bypassed", "the cache has a fixed size (max_cache_len)", "Layers of a fixed size cannot have holes."),
    ),
    **_limits(
        "live",
        CODES,
        "buffers",
        ["static"],
        Limit("refused", "`max_cache_len` must be None with `live_quant`", "Buffers of codes grow."),
    ),
    **_limits("assistant", CHAINS, "rows", ["padded"], _ONE_ROW),
    **_limits("assistant", CHAINS, "rows", ["samples"], _ONE_ANSWER),
    **_limits("assistant", TREES, "rows", ["beams"], _TREE_BEAMS),
    **_limits(
        "assistant",
        CHAINS,
        "rows",
        ["beams"],
        Limit("nothing", "", "transformers leaves drafts out where there are beams."),
    ),
    **_limits(
        "assistant",
        TREES,
        "buffers",
        ["static"],
        Limit("refused", "K/V of branches cannot be held", "Branches are appended and taken back."),
    ),
    **_limits(
        "rows",
        ["samples"],
        "decoding",
        ["greedy"],
        Limit("refused", "Greedy methods", "All answers would be the same; transformers refuses."),
    ),
}
