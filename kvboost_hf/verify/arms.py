"""The arms that `verify_correctness` compares."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

from kvboost_hf.cache.codecs import Codec, LiveQuant, live_config, make_codec
from kvboost_hf.config import KVQuantConfig, Repair, ReusePolicy

RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30, 0.50)
REPAIRS: tuple[Repair, ...] = ("query", "cacheblend", "first_k")

_SPECS = ("int8", "int8:4", "int4", "int2", *(f"turboquant:{bits:g}" for bits in (4, 3.5, 3, 2.5, 2, 1.5, 1)))

ArmKind = Literal["full", "exact", "naive", "repaired", "coded"]


@dataclass(frozen=True, slots=True)
class Coding:
    """K/V in fewer bits, at one place at least."""

    name: str  # such as `"int8"`, `"live turboquant:4"` or both
    codec: Codec | None  # the codec of the store; None for K/V as it is
    live_quant: KVQuantConfig | None  # the quantization of K/V in the caches; None for K/V as it is


@dataclass(frozen=True, slots=True)
class ComparedArm:
    """One way of serving the prompts."""

    policy: ReusePolicy | None  # how stored K/V may be used; None for plain generate()
    warmed: bool = False  # whether documents were stored first, each computed alone
    coding: Coding | None = None  # how K/V is kept, of an arm that measures just that; None for the codec of the store

    @property
    def kind(self) -> ArmKind:
        """The category by which the report judges it."""
        if self.coding is not None:
            return "coded"
        if self.policy is None:
            return "full"
        if self.policy.mode == "exact":
            return "exact"
        return "naive" if self.policy.repair == "none" and self.policy.progressive is False else "repaired"

    @property
    def name(self) -> str:
        """The repair with its measure: `"query 15%"`, `"selective 16, once"`."""
        kind, policy = self.kind, self.policy
        if self.coding is not None:
            return self.coding.name
        if policy is None or kind == "exact":
            return kind
        name: str = kind
        if kind == "repaired":
            name = _repair(policy)
        if policy.overlap_k:
            name += f" + {policy.overlap_k}"
        return f"{name}{self.goes_on}, warmed" if self.warmed else f"{name}{self.goes_on}"

    @property
    def goes_on(self) -> str:
        """What the policy of a repair says of the time after the first token: `", progressive"`, or nothing."""
        if self.policy is None or self.kind != "repaired" or self.policy.progressive is None:
            return ""
        value = self.policy.progressive
        names = {True: ", progressive", False: ", once", "ride": ", riding"}
        return names[value] if isinstance(value, bool | str) else f", {value} a token"


FULL, EXACT = ComparedArm(None), ComparedArm(ReusePolicy())
NAIVE = ComparedArm(ReusePolicy(mode="blend", repair="none", progressive=False))


def coded_arms(
    codecs: Sequence[str | KVQuantConfig], live_quants: Sequence[LiveQuant], own: Codec
) -> tuple[ComparedArm, ...]:
    """Arms for each codec of stored K/V, each of live K/V, and each pair of the two.

    Args:
        codecs: As `ChunkStore` takes them.
        live_quants: As `ChunkReuseCache` takes them.
        own: That of the caller's stores; one more codec if it is lossy.

    Raises:
        ValueError: for an unknown codec, or one that is lossless.
    """
    stored: dict[str, Coding] = {}
    for codec in (*map(make_codec, codecs), *(() if own.lossless else (own,))):
        if codec.lossless:
            raise ValueError(
                f"`codecs` must be lossy, got {codec.name!r}. K/V as it is is always measured: leave that out."
            )
        stored.setdefault(codec.name, Coding(_short(codec), codec, None))
    live: dict[str, Coding] = {}
    for each in live_quants:
        config = live_config(each)
        if config is None:
            raise ValueError(
                f"`live_quants` must be lossy, got {each!r}. Leave it out: K/V as it is is always measured."
            )
        live.setdefault(repr(config), Coding(f"live {_short(make_codec(config))}", None, config))
    both = [Coding(f"{a.name}, {b.name}", a.codec, b.live_quant) for a, b in product(stored.values(), live.values())]
    return tuple(ComparedArm(ReusePolicy(), coding=coding) for coding in (*stored.values(), *live.values(), *both))


def _short(codec: Codec) -> str:
    """The name that users have for a codec, where there is one."""
    return next((spec for spec in _SPECS if make_codec(spec).name == codec.name), codec.name)


DEFAULT = ReusePolicy(mode="blend")
_NAMED = {
    "default": DEFAULT,
    "progressive": ReusePolicy(mode="blend", progressive=True),
    "once": ReusePolicy(mode="blend", progressive=False),
    "none": ReusePolicy(mode="blend", repair="none"),
    "selective": ReusePolicy(mode="blend", repair="selective"),
}


def named_policies(names: Sequence[str]) -> tuple[ReusePolicy, ...]:
    """The policies that go by these names, in their order, each once.

    Args:
        names: `"default"` for `ReusePolicy(mode="blend")`; `"progressive"` and `"once"` for it with all of the repair
            before the second token, and with none after the first; `"none"` and `"selective"` for these repairs;
            `"query"`, `"cacheblend"` and `"first_k"` for a repair at all ratios, or `"query:15"` for one of 15%;
            `"all"` for all of these.

    Raises:
        ValueError: for any other name.
    """
    found: dict[ReusePolicy, None] = {}
    for name in names:
        repair, colon, percent = name.partition(":")
        if name == "all":
            chosen = (*_NAMED.values(), *_at_all_ratios())
        elif name in _NAMED:
            chosen = (_NAMED[name],)
        elif repair in REPAIRS and not colon:
            chosen = tuple(policy for policy in _at_all_ratios() if policy.repair == repair)
        elif repair in REPAIRS and percent.isdecimal() and int(percent) <= 100:
            chosen = (replace(DEFAULT, repair=repair, recompute_ratio=int(percent) / 100),)
        else:
            raise ValueError(
                f"An arm must be one of {', '.join(_NAMED)}, all, or one of {', '.join(REPAIRS)}, alone for all "
                f"ratios or with a percentage as in query:15, got {name!r}."
            )
        found |= dict.fromkeys(chosen)
    return tuple(found)


def _at_all_ratios() -> tuple[ReusePolicy, ...]:
    """Three repairs at six ratios each."""
    return tuple(
        ReusePolicy(mode="blend", repair=repair, recompute_ratio=ratio) for repair in REPAIRS for ratio in RATIOS
    )


def checked_policies(policies: Sequence[ReusePolicy]) -> tuple[ReusePolicy, ...]:
    """`policies`, if each of them moves chunks."""
    for policy in policies:
        if not isinstance(policy, ReusePolicy) or policy.mode != "blend":
            raise ValueError(
                f"`policies` must be ReusePolicy objects with mode 'blend', got {policy!r}. Exact reuse is always "
                f"measured; pass ReusePolicy(mode='blend', repair=…) with one of {get_args(Repair)}."
            )
    return tuple(policies)


def _repair(policy: ReusePolicy) -> str:
    if policy.repair == "none":
        return "none"
    if policy.repair == "selective":
        return f"selective {policy.seam_tokens}"
    most = policy.max_recompute_ratio
    return f"{policy.repair} {_share(policy.recompute_ratio)}{f' to {most:.0%}' if most is not None else ''}"


def _share(ratio: float | None) -> str:
    return "15%" if ratio is None else f"{ratio:.0%}"
