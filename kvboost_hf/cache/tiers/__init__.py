"""Tiers below host memory: their addresses, such as `"disk:~/.cache/kvboost_hf:50GB"`, parsed and opened.

Nothing here imports torch: commands that only look at tiers answer at once.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvboost_hf.cache.tiers.base import Tier, without_secrets
from kvboost_hf.cache.tiers.record import SealedTier, require_key
from kvboost_hf.config import parse_size

TierKind = Literal["ram", "device", "disk", "handover", "valkey", "filesystem"]
HANDOVER: TierKind = "handover"  # a folder that is written when the store is closed

DEFAULT_RAM_BYTES = 4 * 2**30
DEFAULT_DISK_BYTES = 10 * 10**9

_SERVERS = ("redis", "rediss", "valkey", "valkeys", "unix")
_WITHOUT_HOST = ("file", "local", "memory", "unix")
_EXAMPLES = "Examples: 'ram:4GB', 'device:2GiB', 'disk:~/.cache/kvboost_hf:50GB', 'redis://host:6379/0', 's3://bucket/path:1TB'."
_LIKE_A_SIZE = re.compile(r"\d+(?:\.\d+)? ?[A-Za-z]*")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier to be opened."""

    kind: TierKind  # what it is
    location: str = field(repr=False)  # folder or URL, with its password if it has one; empty for memory
    max_bytes: int | None  # budget, or None for what has a limit of its own


def parse_tier(text: str) -> TierSpec:
    """A parsed address of a tier.

    Args:
        text: `ram:SIZE`, `device:SIZE`, `disk:PATH`, `handover:PATH`, the URL of a Valkey or Redis server, or any that
            fsspec knows. Each place below memory may be followed by `:SIZE`, its budget. Sizes are numbers with a
            unit: 1 GB or 1 G are 10^9 bytes, 1 GiB or 1 Gi are 2^30.

    Raises:
        ValueError: for anything else.

    Example:
        >>> parse_tier("ram:4GB").max_bytes
        4000000000
        >>> parse_tier("disk:/var/cache/kv:1GiB").location
        '/var/cache/kv'
        >>> parse_tier("s3://bucket/kv:1TB").max_bytes
        1000000000000
    """
    scheme, found, rest = text.partition("://")
    if found and re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        location, max_bytes = _without_size(text)
        if location.endswith("://"):
            raise _invalid(text, "there is nothing after the scheme")
        return TierSpec("valkey" if scheme in _SERVERS else "filesystem", location, max_bytes)
    kind, _, rest = text.partition(":")
    if kind == "ram":
        return TierSpec("ram", "", _parse_size(text, rest))
    if kind == "device":
        return TierSpec("device", "", _parse_size(text, rest))
    if kind in ("disk", HANDOVER):
        path, colon, last = rest.rpartition(":")
        has_size = colon and re.match(r"\d[^/\\]*$", last)  # what else follows a colon is of the path
        if not (path if has_size else rest):
            raise _invalid(text, f"there is no path after '{kind}:'")
        folder, size = (path, _parse_size(text, last)) if has_size else (rest, DEFAULT_DISK_BYTES)
        return TierSpec("disk" if kind == "disk" else HANDOVER, folder, size)
    raise _invalid(text, "it must begin with 'ram:', 'device:', 'disk:', 'handover:' or the scheme of a URL")


@dataclass(frozen=True, slots=True)
class Tiers:
    """All tiers of a store."""

    ram: int  # bytes of host memory
    device: int  # bytes where the model computes; 0 for none
    lower: tuple[Tier, ...]  # those below host memory, the nearest first
    opened: tuple[Tier, ...]  # those of them that were not given as objects: whoever asked for them closes them
    at_close: frozenset[str]  # names of those that are written when the store is closed


def require_tiers(tiers: object) -> None:
    """Refuse what holds no tiers. ValueError: one text, or what is no sequence."""
    if isinstance(tiers, str):
        raise ValueError(f"`tiers` must be a sequence, got the text {without_secrets(tiers)!r}. Pass [text].")
    if not isinstance(tiers, Iterable):
        raise ValueError(f"`tiers` must be a sequence of addresses or `Tier` objects, got {tiers!r}. Leave it out.")


def open_tiers(
    tiers: Sequence[str | Tier], max_bytes: int | None, key: bytes | None = None, *, least_bytes: int = 0
) -> Tiers:
    """Open the tiers of a store, with `max_bytes` of host memory if no address tells, and seals of a `key`.

    ImportError: one needs a package that is not installed. ValueError: what is no address or tier, a size below
    `least_bytes`, which take one chunk, two sizes for one memory, or a key that is none.
    """
    require_tiers(tiers)
    if key is not None:
        require_key(key)
    specs = [_checked(tier, least_bytes) for tier in tiers]
    memory: dict[str, list[int]] = {"ram": [max_bytes] if max_bytes is not None else [], "device": []}
    for spec in specs:
        if isinstance(spec, TierSpec) and spec.kind in memory and spec.max_bytes is not None:
            memory[spec.kind].append(spec.max_bytes)
    for kind, sizes in memory.items():
        if len(sizes) > 1:
            hint = ", `max_bytes` being one" if kind == "ram" and max_bytes is not None else ""
            raise ValueError(f"`tiers` must give one size of {kind!r} at most, got {sizes}{hint}.")
    lower: list[Tier] = []
    opened: list[Tier] = []
    at_close = frozenset(spec.kind for spec in specs if isinstance(spec, TierSpec) and spec.kind == HANDOVER)
    try:
        for spec in specs:
            if not isinstance(spec, TierSpec):
                lower.append(spec)
            elif spec.kind not in memory:
                opened.append(open_tier(spec))
                lower.append(opened[-1])
        if key is not None:
            lower = [SealedTier(tier, key) for tier in lower]
        names = [tier.name for tier in lower]
        if len(set(names)) < len(names):  # they would be one in reports and stats
            raise ValueError(f"`tiers` must have one tier of each kind at most, got {names}.")
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    (ram,) = memory["ram"] or [DEFAULT_RAM_BYTES]
    (device,) = memory["device"] or [0]
    return Tiers(ram, device, tuple(lower), tuple(opened), at_close)


def open_tier(spec: TierSpec) -> Tier:
    """The tier at an address.

    ImportError: it needs a package that is not installed. ValueError: memory, which the store keeps itself, or an
    address that its tier does not take.
    """
    if spec.kind in ("disk", HANDOVER):
        from kvboost_hf.cache.tiers.disk import DiskTier

        return DiskTier(spec.location, spec.max_bytes or DEFAULT_DISK_BYTES, name=spec.kind)
    if spec.kind == "valkey":
        from kvboost_hf.cache.tiers.valkey import ValkeyTier

        return ValkeyTier(spec.location, max_bytes=spec.max_bytes)
    if spec.kind == "filesystem":
        from kvboost_hf.cache.tiers.filesystem import FilesystemTier

        return FilesystemTier(spec.location, max_bytes=spec.max_bytes)
    raise ValueError(f"A tier of kind {spec.kind!r} is no place to open: the store keeps it itself.")


def _checked(tier: object, least_bytes: int) -> TierSpec | Tier:
    if isinstance(tier, str):
        spec = parse_tier(tier)
        if spec.max_bytes is not None and spec.max_bytes < least_bytes:
            why = f"its size must hold at least one chunk, which is {least_bytes} bytes, got {spec.max_bytes}"
            raise _invalid(tier, why)
        return spec
    if not isinstance(tier, Tier):
        raise ValueError(f"`tiers` must be addresses or `Tier` objects, got {tier!r}. {_EXAMPLES}")
    return tier


def _without_size(url: str) -> tuple[str, int | None]:
    """A URL without the size behind it, and that size; a number without a unit may be the port of a host."""
    scheme, _, rest = url.partition("://")
    place, colon, last = rest.rpartition(":")
    if not colon or _LIKE_A_SIZE.fullmatch(last) is None:
        return url, None
    may_be_port = place and scheme not in _WITHOUT_HOST and ("/" not in place or "?" in place)
    if last.isdecimal() and may_be_port:
        return url, None
    return f"{scheme}://{place}", _parse_size(url, last)


def _parse_size(text: str, size: str) -> int:
    nbytes = parse_size(size)
    if nbytes is None:
        raise _invalid(text, f"its size must be a positive number with a unit such as MB, GB or GiB, got {size!r}")
    return nbytes


def _invalid(text: str, why: str) -> ValueError:
    return ValueError(f"{without_secrets(text)!r} is no address of a tier: {why}. {_EXAMPLES}")


def require_lasting(addresses: Sequence[str]) -> None:
    """Check that one of these tiers outlives the process. ValueError: none does."""
    if all(parse_tier(address).kind in ("ram", "device") for address in addresses):
        raise ValueError(f"`--tiers` must have one that outlives a process, got {list(addresses)}. Pass disk:FOLDER.")
