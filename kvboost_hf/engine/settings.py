"""`EngineSettings`: the settings of a `KVBoost`, and the policy and store made from them.

Nothing here imports torch before settings are made, so that their flags are known at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvboost_hf.config import KVQuantConfig, Progressive, RecomputeStrategy, ReusePolicy, parse_size, require_size
from kvboost_hf.fields import check_bounds, same, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvboost_hf.cache.planning.chunks import Chunker
    from kvboost_hf.cache.store.chunk_store import ChunkStore
    from kvboost_hf.cache.tiers.base import Tier

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)

REUSED = "what is kept, and how it is used again"  # groups of flags
ALIKE = "what a server must have alike to find it, by the same flags with the same defaults"

_CODECS = {16: "raw", 8: "int8", 4: "int4"}
_BOUNDARY_WINDOW = 16  # tokens, where nobody says otherwise
_TOKEN_ID_BYTES = 8


def _size(text: str) -> int:
    size = int(float(text)) if text.replace(".", "").replace("e", "").isdigit() else parse_size(text)
    if not size:
        raise ValueError(f"must be bytes, or text with a unit such as 8GB or 7.5GiB, got {text!r}")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of a `KVBoost`.

    Args:
        recompute_strategy: A `RecomputeStrategy`, or its value: chunks are used anywhere in a prompt, and repaired.
            Answers may differ from those of plain `generate()`. None uses K/V only where everything before it is the
            same, too, and answers are those of plain `generate()`.
        chunk_size: Tokens per chunk, a multiple of 16.
        chunk_boundary_window: Cut by content, and let cuts move up to so many tokens to the end of a sentence; 0 cuts
            at multiples of `chunk_size`. None is 16 with a tokenizer of transformers and chunks of 32 or more, else 0.
        max_cache_bytes: Host memory for K/V: bytes, or text such as `"2GB"`; None for 4 GiB.
        max_chunks: In place of it, room for so many chunks that are not compressed.
        kv_cache_bits: 16 keeps K/V as it is, 8 and 4 as codes of so many bits, which is lossy. None is 16, or what
            `codec` says.
        codec: In place of `kv_cache_bits`, how stored K/V is kept: raw, int8, int8:4, int4, turboquant:3.5, …, as
            `ChunkStore` takes it.
        live_quant: Hold K/V as codes while it is used, too, as a cache with `live_quant` does: bits of
            `"turboquant"`, the name of a codec, or a `KVQuantConfig`. Answers may differ; None is as it is.
        disk_cache_dir: A folder that keeps up to 10 GB of K/V for later processes.
        tiers: Other places for K/V, as `ChunkStore` takes them, such as `disk:~/.cache/kvboost_hf:50GB` or
            `redis://localhost:6379`.
        tier_key: 32 bytes or more that seal what is written to `disk_cache_dir` and `tiers`, as `ChunkStore` takes it.
        recompute_overlap: Tokens after each seam that `"selective"` computes again.
        recompute_ratio: Share of the moved tokens that the other strategies but `"none"` compute again. None is 0.15,
            but no more than 64 behind each seam.
        sink_tokens: The first tokens of a prompt, which are never moved.
        overlap_k: Tokens before each seam that every strategy computes again.
        progressive: Go on with the repair before the second token until K/V is exact, or never, or as `ReusePolicy`
            has it; None is along with later tokens and in idle moments, where moved text has many seams.
        min_prefill_saving: Chunks are moved where that saves at least so many tokens.
        prefill_chunk_size: The most prompt tokens in a forward; 0 for all at once.
        salt: Separates those who must not see each other's prompts.
        chat_template: A text is sent as the message of a user, where the tokenizer has a chat template; False sends
            texts as they are.

    Raises:
        ValueError: for an unknown strategy or codec, a text that is no address of a tier, other bits, counts or ratios
            that are none, both of `max_cache_bytes` and `max_chunks`, or of `codec` and `kv_cache_bits`, `live_quant`
            beside a strategy, and a window that `chunk_size` has no room for.
    """

    recompute_strategy: RecomputeStrategy | str | None = setting(
        None,
        group=REUSED,
        flag=("recompute-strategy", "repair"),
        choices=("exact", *map(str, RecomputeStrategy)),
        help="'exact' gives the answers of plain generate(); with the others K/V moves, and answers may differ "
        "(default: exact)",
    )
    chunk_size: int = setting(128, group=ALIKE)
    chunk_boundary_window: int | None = setting(None, group=ALIKE, metavar="TOKENS")
    max_cache_bytes: int | str | None = setting(None, group=REUSED, metavar="SIZE", parse=_size)
    max_chunks: int | None = setting(None, least=1)
    kv_cache_bits: int | None = setting(None, group=ALIKE, choices=(4, 8, 16))
    codec: str | KVQuantConfig | None = setting(None, group=ALIKE, parse=str)
    live_quant: str | float | KVQuantConfig | None = setting(
        None,
        group=ALIKE,
        metavar="BITS",
        parse=str,
        help="quantize the K/V of running requests, too: bits of turboquant, or the name of a codec (default: no)",
    )
    disk_cache_dir: str | Path | None = setting(None, group=ALIKE, metavar="FOLDER", parse=str)
    tiers: "Sequence[str | Tier]" = setting((), group=ALIKE, metavar="ADDRESS", parse=str, nargs="+")
    tier_key: bytes | None = field(default=None, repr=False)
    recompute_overlap: int = same(ReusePolicy, "seam_tokens")
    recompute_ratio: float | None = same(ReusePolicy, "recompute_ratio", group=REUSED, metavar="SHARE")
    sink_tokens: int = same(ReusePolicy, "sink_tokens", group=REUSED)
    overlap_k: int = same(ReusePolicy, "overlap_k", group=REUSED)
    progressive: Progressive | None = same(ReusePolicy, "progressive", group=REUSED, parse=bool)
    min_prefill_saving: int = same(ReusePolicy, "min_prefill_saving")
    prefill_chunk_size: int = setting(0, least=0)
    salt: str | bytes = b""
    chat_template: bool = True

    def __post_init__(self) -> None:
        from kvboost_hf.cache.codecs import config_of
        from kvboost_hf.cache.tiers import parse_tier, require_tiers

        if self.recompute_strategy is not None:
            choice(
                RecomputeStrategy, "recompute_strategy", self.recompute_strategy, " Pass None for exact reuse only."
            )
        if self.kv_cache_bits not in (None, *_CODECS):
            raise ValueError(
                f"`kv_cache_bits` must be 16, 8 or 4, got {self.kv_cache_bits!r}. Pass another `codec` in its place."
            )
        if self.codec is not None and self.kv_cache_bits is not None:
            raise ValueError(
                f"`kv_cache_bits` must be None beside a `codec` ({self.codec!r}), got {self.kv_cache_bits}. Pass one "
                "of the two."
            )
        config_of(self.codec)  # refuses what is none
        if not isinstance(self.disk_cache_dir, str | PathLike | None):
            raise ValueError(f"`disk_cache_dir` must name a folder or be None, got {self.disk_cache_dir!r}.")
        require_tiers(self.tiers)
        for tier in self.tiers:
            if isinstance(tier, str):
                parse_tier(tier)  # refuses what is no address, before a model is loaded
        if self.live_config is not None and self.recompute_strategy is not None:
            raise ValueError(
                f"`live_quant` must be None with a `recompute_strategy` ({str(self.recompute_strategy)!r}), for codes "
                f"cannot be moved, got {self.live_quant!r}. Leave out one of the two, or pass a `codec`, which is for "
                "stored K/V."
            )
        if self.max_chunks is not None and self.max_cache_bytes is not None:
            raise ValueError(
                f"`max_chunks` must be None beside `max_cache_bytes` ({self.max_cache_bytes}), got {self.max_chunks}. "
                "Pass one of the two."
            )
        if self.max_cache_bytes is not None:
            require_size("max_cache_bytes", self.max_cache_bytes, least=1)
        if not isinstance(self.chat_template, bool):
            raise ValueError(
                f"`chat_template` must be True or False, got {self.chat_template!r}. Set tokenizer.chat_template for "
                "another template."
            )
        self._require_cutting()
        check_bounds(self)
        self.policy()  # refuses the rest

    def _require_cutting(self) -> None:
        from kvboost_hf.cache.planning.chunks import ContentChunker, FixedChunker

        size, window = self.chunk_size, self.chunk_boundary_window
        FixedChunker(size)
        if window is not None and (type(window) is not int or not 0 <= window < size):
            raise ValueError(
                f"`chunk_boundary_window` must be an int from 0 to {size - 1}, less than `chunk_size`, or None, got "
                f"{window!r}. Pass 0 to cut at multiples of `chunk_size`."
            )
        if window:
            ContentChunker(size, boundary_window=window)

    @property
    def live_config(self) -> KVQuantConfig | None:
        """`live_quant`, as `ChunkReuseCache` takes it."""
        from kvboost_hf.cache.codecs import live_config

        return live_config(self.live_quant)

    def policy(self) -> ReusePolicy:
        """How stored K/V may be used."""
        strategy = self.recompute_strategy
        return ReusePolicy(
            mode="exact" if strategy is None else "blend",
            repair=RecomputeStrategy(strategy or RecomputeStrategy.AUTO).value,
            recompute_ratio=self.recompute_ratio,
            seam_tokens=self.recompute_overlap,
            sink_tokens=self.sink_tokens,
            overlap_k=self.overlap_k,
            progressive=self.progressive,
            min_prefill_saving=self.min_prefill_saving,
        )

    def store(self, model: "PreTrainedModel", tokenizer: Any) -> "ChunkStore":
        """A new store.

        Args:
            model: Whose K/V it holds.
            tokenizer: The tokenizer of the model.
        """
        from kvboost_hf.cache.store.chunk_store import ChunkStore
        from kvboost_hf.cache.tiers import DEFAULT_DISK_BYTES
        from kvboost_hf.compat import bytes_per_token

        max_bytes = self.max_cache_bytes
        if self.max_chunks is not None:
            max_bytes = self.max_chunks * self.chunk_size * (bytes_per_token(model) + _TOKEN_ID_BYTES)
        tiers = self.tiers
        if self.disk_cache_dir is not None:
            tiers = [*tiers, f"disk:{self.disk_cache_dir}:{DEFAULT_DISK_BYTES}B"]
        return ChunkStore(
            model,
            chunker=self.chunker(tokenizer),
            max_bytes=max_bytes,
            salt=self.salt,
            tiers=tiers,
            tier_key=self.tier_key,
            codec=self.codec if self.codec is not None else _CODECS[self.kv_cache_bits or 16],
        )

    def chunker(self, tokenizer: Any) -> "Chunker":
        """The chunker for prompts of a tokenizer."""
        from transformers import PreTrainedTokenizerBase

        from kvboost_hf.cache.planning.chunks import LEAST_CHUNK_SIZE, ContentChunker, FixedChunker

        size, window = self.chunk_size, self.chunk_boundary_window
        if window is None and isinstance(tokenizer, PreTrainedTokenizerBase) and size >= LEAST_CHUNK_SIZE:
            window = _BOUNDARY_WINDOW
        return ContentChunker.for_tokenizer(tokenizer, size, window) if window else FixedChunker(size)


SETTINGS = frozenset(field.name for field in fields(EngineSettings))
_IN_ORDER = (  # behind model and tokenizer, as kvboost takes them
    "chunk_size", "max_chunks", "recompute_overlap", "recompute_strategy", "recompute_ratio", "kv_cache_bits",
    "disk_cache_dir", "device",
)  # fmt: skip
_OF_POLICY = frozenset(
    (
        *("recompute_strategy", "recompute_overlap", "recompute_ratio", "sink_tokens", "overlap_k", "progressive"),
        "min_prefill_saving",
    )
)
_OF_STORE = frozenset(
    (
        *("chunk_size", "chunk_boundary_window", "max_cache_bytes", "max_chunks", "kv_cache_bits", "codec"),
        *("disk_cache_dir", "tiers", "tier_key", "salt"),
    )
)


def settings_in_order(given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that were given without names, in the order in which kvboost takes them.

    Raises:
        TypeError: for more than there are, or one that was named, too.
    """
    if len(given) > len(_IN_ORDER):
        raise TypeError(
            f"KVBoost takes a model, a tokenizer and {len(_IN_ORDER)} settings in order ({', '.join(_IN_ORDER)}), got "
            f"{len(given)} settings. Name the others."
        )
    found = dict(zip(_IN_ORDER, given, strict=False))
    if twice := sorted(found.keys() & named.keys()):
        raise TypeError(f"`{twice[0]}` was given twice, as {found[twice[0]]!r} and as {named[twice[0]]!r}.")
    return found


def unknown_setting(name: str) -> TypeError:
    """The error for a setting that there is not, with one of a like name."""
    close = get_close_matches(name, SETTINGS, n=1)
    remedy = f"Did you mean `{close[0]}`?" if close else f"There are {', '.join(sorted(SETTINGS))}."
    return TypeError(f"KVBoost has no setting `{name}`. {remedy}")


def checked_settings(
    given: Mapping[str, Any], policy: ReusePolicy | None, store: "ChunkStore | None" = None
) -> EngineSettings:
    """Make settings of arguments, and check them against a policy or a store that replaces some of them.

    Raises:
        ValueError: for settings beside a policy or a store that has them, and settings that do not go together.
        TypeError: for a name that is none.
    """
    from kvboost_hf.cache.store.chunk_store import ChunkStore

    for name, whole, kind, own in (
        ("policy", policy, ReusePolicy, _OF_POLICY),
        ("store", store, ChunkStore, _OF_STORE),
    ):
        if whole is None:
            continue
        if not isinstance(whole, kind):
            remedy = " Pass ReusePolicy(mode='blend') or ReusePolicy()." if kind is ReusePolicy else ""
            raise ValueError(f"`{name}` must be a {kind.__name__}, got {whole!r}.{remedy}")
        if beside := sorted(key for key in own & given.keys() if given[key] is not None):
            raise ValueError(
                f"{', '.join(f'`{key}`' for key in beside)} must be left out beside a `{name}`, which has its own. "
                f"Pass what is meant to {kind.__name__}, or leave out the `{name}`."
            )
    if unknown := sorted(given.keys() - SETTINGS):
        raise unknown_setting(unknown[0])
    settings = EngineSettings(**given)
    if policy is not None and policy.mode == "blend" and settings.live_quant is not None:
        raise ValueError(
            f"`live_quant` must be None with a policy of mode 'blend', for codes cannot be moved, got "
            f"{settings.live_quant!r}. Leave out one of the two."
        )
    return settings


def choice(kind: type[ChoiceT], name: str, value: object, remedy: str = "") -> ChoiceT:
    """The member of an enumeration that an argument names.

    Raises:
        ValueError: for anything else.
    """
    try:
        return kind(value)  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(f"`{name}` must be one of {[str(each) for each in kind]}, got {value!r}.{remedy}") from None
