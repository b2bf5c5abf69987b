"""What a history is made of: plain values, whose `repr` names only those that are not the default."""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any

import torch

from tests.architectures.outcome import text_ids

TEXTS = [text_ids(400, seed=50 + i) for i in range(4)]

REUSES = (
    "a new cache",
    "a kept cache",
    "one cache for all threads",
    "attach",
)


COPIES = ("deepcopy", "pickle", "DynamicCache")
# What is done to a kept cache: a part of what it holds goes, or something is put in its place, or elsewhere.
EDITS = ("drop", "replace", "insert", "move on", "move back", "edit nothing")

# What becomes of the mask of a prompt: a token in its middle is hidden, its padding is behind it, or none is passed.
MASKS = ("holes", "right", "none")
# Embeddings that are passed beside the ids: those of the ids, or others.
EMBEDDINGS = ("same", "other")
# Ways to have a model compute something else, and what it computed before again.
CHANGES = ("in place", "data", "load_state_dict", "parameter", "hook", "function")

# Code of the user that changes what forwards are given: some tokens are others, by a hook in front of ours, behind it,
# or by what prepares them; a column is hidden from the tokens of an answer; a prompt comes with `use_cache=False`.
USERS = ("ids in front", "ids behind", "ids prepared", "mask of steps", "no use of the cache")

# What a call is made within. Answers with rounded products are not compared, but must leave nothing behind.
MODES = ("inference mode", "autocast", "bfloat16 by default", "float64 by default", "deterministic algorithms")


class _Short:
    """Base of records whose `repr` is the call that makes them, without what is left at its default."""

    def __repr__(self) -> str:
        told = [f"{name}={value!r}" for name, value in changed(self)]
        return f"{type(self).__name__}({', '.join(told)})"


def default_of(of: Field[Any]) -> Any:
    """The default of a field of a record."""
    return of.default_factory() if callable(of.default_factory) else of.default


def changed(record: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields that are not at their default."""
    for of in fields(record):
        value = getattr(record, of.name)
        if value != default_of(of):
            yield of.name, value


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Row(_Short):
    """Tokens of a row: the beginning of one text, then the beginning of another.

    Args:
        text: The number of the first one.
        head: How many tokens of it.
        other: The number of the second one.
        tail: How many tokens of it.
    """

    text: int = 0
    head: int = 0
    other: int = 1
    tail: int = 0

    @property
    def ids(self) -> torch.Tensor:
        """Ids [1, head + tail]."""
        return torch.cat([TEXTS[self.text][:, : self.head], self.end], dim=1)

    @property
    def end(self) -> torch.Tensor:
        """Ids [1, tail]."""
        return TEXTS[self.other][:, 100 : 100 + self.tail]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Call(_Short):
    """One call of `generate()`.

    Args:
        rows: What is asked. Behind an earlier answer, only the ends of rows count.
        follows: How many calls back the answer is that the prompt goes on from; 0 for none.
        only_new: Pass the ids that the cache does not hold, and the mask of everything, not the whole prompt.
        copied: How the cache that it goes on with is copied before: see `COPIES`.
        loop: Call the model itself, token by token, in place of `generate()`.
        new: The most tokens of the answer.
        options: Arguments of `generate()`; and "draft", which `families.py` turns into arguments.
        before: What is done to a kept cache before the call.
        raises: What raises in the middle of it, and when.
        nested: What calls `generate()` in the middle of it.
        mask: What becomes of the mask: see `MASKS`.
        embeds: Embeddings to pass, too: see `EMBEDDINGS`.
        within: What the call is made within: see `MODES`.
        changed: How the model has been changed by then, and how much: see `CHANGES`. It is changed back after that.
        user: What code of the user changes in its forwards: see `USERS`.
    """

    rows: tuple[Row, ...] = (Row(head=20),)
    follows: int = 0
    only_new: bool = False
    copied: str | None = None
    loop: bool = False
    new: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    raises: tuple[str, int] | None = None
    nested: str | None = None
    mask: str | None = None
    embeds: str | None = None
    within: str | None = None
    changed: tuple[str, int] | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class History(_Short):
    """Calls, and what serves them.

    Answers are not compared with codes, nor with a policy that moves K/V without computing all of it again at once.

    Args:
        family: A model type.
        attention: The attention's implementation.
        reuse: What brings the reuse: see `REUSES`.
        max_cache_len: The `max_cache_len` of the caches, or of `attach`.
        live_quant: Hold codes.
        policy: Arguments of `ReusePolicy`.
        chunk_size: The chunk size of the store.
        max_bytes: The room of the store, in chunks; None for more than enough.
        disk: Whether there is a tier on disk.
        threads: How many play the calls, each every n-th.
        watched: Whether another thread reads what users may watch meanwhile.
        calls: In order.
    """

    family: str = "llama"
    attention: str = "eager"
    reuse: str = "a new cache"
    max_cache_len: int | str | None = None
    live_quant: bool = False
    policy: dict[str, Any] = field(default_factory=lambda: {"min_prefill_saving": 0})
    chunk_size: int = 16
    max_chunks: int | None = None
    disk: bool = False
    threads: int = 1
    watched: bool = False
    calls: tuple[Call, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether K/V is used behind another text than it was computed behind."""
        return self.policy.get("mode") == "blend" and self.policy.get("recompute_ratio") != 1.0

    @property
    def differs(self) -> bool:
        """Whether answers may differ from those of plain `generate()`."""
        return self.live_quant or self.moves
