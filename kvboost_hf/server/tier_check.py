"""Checks whether a server finds the K/V in its tiers; if not, says which flag differs and what to type."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

import numpy as np
from transformers import PreTrainedModel

from kvboost_hf.cache.codecs import config_of, make_codec
from kvboost_hf.cache.identity import ModelState, model_name
from kvboost_hf.cache.layers.quantized import mark
from kvboost_hf.cache.planning.chunks import Chunker, root_key
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.cache.store.history import versions
from kvboost_hf.cache.tiers.base import Entry, Kind
from kvboost_hf.compat import TAKE_MASKS, attn_implementation
from kvboost_hf.config import KVQuantConfig

_OWN = "the --codec and --live-quant of this server"
_NOT_KNOWN = (
    "a `cache_salt`, and are found by clients that send it; or with a `prompt_cache_key` by an earlier release, other "
    "weights, an API key or a `--salt` that it does not have, another `--codec` or `--attn-implementation`, or other "
    "versions of PyTorch or transformers, and then `kvboost-hf warm` is to be run again, with its flags."
)
LOOKED_AT = 10_000  # blobs
_COMPARED = 16  # roots, of each of which a blob is read
_LOSSY = ("int8", "int8:4", "int4", "int2", "turboquant", "turboquant:3.5", "turboquant:3", "turboquant:2")


@dataclass(frozen=True, slots=True)
class InTiers:
    """The chunks that the tiers of a server hold."""

    held: Sequence[Entry]  # all entries, of other models, too; the first 10,000
    own: Sequence[Entry]  # those of them that are of this model
    found: Sequence[Entry]  # those of `own` that this server finds
    roots: frozenset[bytes]  # the roots that this server searches under

    @classmethod
    def of(
        cls, model: PreTrainedModel, store: ChunkStore, live_quant: KVQuantConfig | None, salts: Sequence[bytes]
    ) -> "InTiers | None":
        """The chunks that the tiers of `store` hold; None where the K/V of the model is not kept. See `unfound`."""
        held = list(islice(store.entries(), LOOKED_AT))
        fingerprint = ModelState.of(model).fingerprint.durable(model) if held else b""
        if not isinstance(fingerprint, bytes):
            return None
        own = [entry for entry in held if entry.model == model_name(model)]
        codec = _live(live_quant) + store.codec.name.encode()
        roots = frozenset(root_key(fingerprint, salt, codec) for salt in salts)
        return cls(held, own, [entry for entry in own if entry.root in roots], roots)


def unfound(
    model: PreTrainedModel,
    store: ChunkStore,
    live_quant: KVQuantConfig | None,
    salts: Sequence[bytes],
    kept: InTiers | None = None,
) -> str | None:
    """Why the server cannot find K/V of the model in its tiers, or only a part; None if it can, as far as is known."""
    kept = kept or InTiers.of(model, store, live_quant, salts)
    if kept is None or not kept.held:
        return None
    own, found = kept.own, kept.found
    if not own:
        return (
            f"The tiers hold {len(kept.held)} chunks, but none of this model: they are of others, of this one with "
            "another `--dtype`, or of an earlier release of kvboost_hf."
        )
    others = {entry.root: entry.key for entry in own if entry.root not in kept.roots}
    told = _compared(model, store, _live(live_quant), salts, others, attentions=not found)
    reasons = [_cut_elsewhere(store.chunker, found)]
    if told is not None or not found:
        root, stored_with = told or (None, _NOT_KNOWN)
        count = sum(entry.root == root for entry in own)
        which = f"{count} of them" if 0 < count < len(own) - len(found) else "they"
        reasons.append(
            f"The tiers hold {len(own) - len(found)} chunks of this model that are not found by this server: {which} "
            f"were stored with {stored_with}"
        )
    return " ".join(filter(None, reasons)) or None


def _live(live_quant: KVQuantConfig | None) -> bytes:
    return mark(live_quant) if live_quant is not None else b""


def _compared(
    model: PreTrainedModel,
    store: ChunkStore,
    live: bytes,
    salts: Sequence[bytes],
    keys: Mapping[bytes, bytes],
    *,
    attentions: bool,
) -> tuple[bytes, str] | None:
    """A root that this server does not find, with which flags it was stored, and what to do; None where nobody knows.

    `keys` has a chunk of each root. With `attentions` others are tried for chunks that do not tell theirs: all weights
    are read again for each.
    """
    untold: set[bytes] = set()  # roots of chunks that earlier releases have stored
    newer: tuple[bytes, str] | None = None
    for root, key in islice(keys.items(), _COMPARED):
        made = store.made_with(key)
        if made is None:
            untold.add(root)
            continue
        if made.versions != versions() and newer is None:
            told = re.sub(r"[^\w.+, -]", "?", made.versions[:100])  # anybody may have written it
            newer = root, f"{told}; this server has {versions()}. Run `kvboost-hf warm` again, with its flags."
        kept = [made.codec], [made.regime.encode("latin-1", "replace")]
        tried = [made.attention] if made.attention in {attn_implementation(model), *TAKE_MASKS} else []
        if (found := _difference(model, store.codec.name, live, salts, {root}, tried, *kept)) is not None:
            return found
    own = attn_implementation(model)
    tried = [own, *(name for name in TAKE_MASKS if attentions and name != own)]
    codecs, lives = [store.codec.name, *_codec_flags()], [live, *_live_flags()]
    guessed = _difference(model, store.codec.name, live, salts, untold, tried, codecs, lives) if untold else None
    return guessed or newer


def _codec_flags() -> dict[str, str]:
    return {make_codec(spec).name: f"--codec {spec}" for spec in ("raw", *_LOSSY)}


def _live_flags() -> dict[bytes, str]:
    known = {mark(config): f"--live-quant {spec}" for spec in _LOSSY if (config := config_of(spec)) is not None}
    return {b"": "no --live-quant"} | known


def _difference(
    model: PreTrainedModel,
    codec: str,
    live: bytes,
    salts: Sequence[bytes],
    roots: Collection[bytes],
    tried_attentions: Sequence[str],
    tried_codecs: Sequence[str],
    tried_lives: Sequence[bytes],
) -> tuple[bytes, str] | None:
    """One of `roots` that these attentions, codecs and live codes make, with which flags, and what to do; or None."""
    own, codecs, lives = attn_implementation(model), _codec_flags(), _live_flags()
    tenants = dict.fromkeys([b"", *salts], "the --api-key and --salt of this server") | {b"": "no --api-key or --salt"}
    for attention in tried_attentions:
        fingerprint = _fingerprint_with(model, attention)
        for tried in product(tried_codecs, tried_lives, [*salts, b""]):
            if fingerprint is None:
                continue
            root = root_key(fingerprint, tried[2], tried[1] + tried[0].encode())
            if root not in roots:
                continue
            pairs = [
                (f"--attn-implementation {attention}", f"--attn-implementation {own}"),
                (codecs.get(tried[0], _OWN), codecs.get(codec, _OWN)),
                (lives.get(tried[1], _OWN), lives.get(live, _OWN)),
                (tenants[tried[2]], tenants[tried[2] if tried[2] in salts else salts[0]]),
            ]
            differ = [pair for pair in pairs if pair[0] != pair[1]]
            theirs, wanted = (_shown(settings) for settings in zip(*differ, strict=True))
            return root, f"{theirs}. Serve with that, or run `kvboost-hf warm` again with {wanted}."
    return None


def _shown(settings: Sequence[str]) -> str:
    """Flags in one piece, and then settings that are no flags."""
    flags = " ".join(setting for setting in settings if setting.startswith("--"))
    others = dict.fromkeys(setting for setting in settings if not setting.startswith("--"))
    return ", ".join([*([f"`{flags}`"] if flags else []), *others])


def _fingerprint_with(model: PreTrainedModel, attention: str) -> bytes | None:
    """The fingerprint of a model with another attention, which it has meanwhile; None where it does not take it."""
    own = attn_implementation(model)
    try:
        if attention != own:
            model.set_attn_implementation(attention)
        fingerprint = ModelState.of(model).fingerprint.durable(model)
    except (ImportError, ValueError):
        return None
    finally:
        if attn_implementation(model) != own:
            model.set_attn_implementation(own)
    return fingerprint if isinstance(fingerprint, bytes) else None


def _cut_elsewhere(chunker: Chunker, found: Sequence[Entry]) -> str | None:
    """Whether chunks that something continues end where others would; None where that is not known."""
    following = {entry.parent: entry for entry in found if entry.kind is Kind.CHUNK}
    for first in found:
        if first.kind is not Kind.CHUNK or first.start:
            continue
        chain = [first]
        while (after := following.pop(chain[-1].key, None)) is not None:
            chain.append(after)
        text, at = np.concatenate([entry.tokens for entry in chain]), 0
        for entry in chain[:-1]:
            cut, stop = chunker.next_cut(text, at), at + len(entry.tokens)
            if cut not in (None, stop):
                return (
                    f"The tiers hold prompts of this model that were cut after {stop} tokens, where this server cuts "
                    f"after {cut}: less of them is found. Run `kvboost-hf warm` again with the --chunk-size and "
                    "--chunk-boundary-window of this server."
                )
            at = stop
    return None
