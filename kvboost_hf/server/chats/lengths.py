"""Bounds the text that a token can stand for, so that a text that cannot fit is refused before it is tokenized."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

# For tokenizers that may drop some of a text, such as white space, or take any number of characters for one token.
UNSURE_CHARS = 256

# NFC and NFKC compose one character of four at most, and leave ASCII as it is.
_COMPOSED = 4

# None of them makes a text shorter, in characters.
_KEEPING_NORMALIZERS = {"Prepend", "Lowercase", "NFD", "NFKD", "ByteLevel"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}


@dataclass(frozen=True, slots=True)
class Reach:
    """How many characters one token can stand for.

    Args:
        ascii: In a text of ASCII alone.
        other: In any other text.
    """

    ascii: int
    other: int

    def most(self, text: str, tokens: int) -> int:
        """How many characters `tokens` tokens can have at most, in a text such as this one."""
        return tokens * (self.ascii if text.isascii() else self.other)


def reach_of(tokenizer: Any) -> Reach:
    """How many characters one token of a tokenizer can stand for.

    Where all that the tokenizer does is known to keep each character, that is the length of the longest token;
    else `UNSURE_CHARS`, or the length of the longest token if that is more.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    if not isinstance(backend, Tokenizer):
        return Reach(max(longest, UNSURE_CHARS), max(longest, UNSURE_CHARS))
    parts = json.loads(backend.to_str())
    normalizers, pre_tokenizers = (
        _flat(parts["normalizer"], "normalizers"),
        _flat(parts["pre_tokenizer"], "pretokenizers"),
    )
    byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers))
    if not (
        all(map(_keeps_length, normalizers))
        and all(map(_keeps_all, pre_tokenizers))
        and _knows_all(parts["model"], backend, byte_level)
        and not any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    ):
        longest = max(longest, UNSURE_CHARS)
    composes = any(part["type"] in ("NFC", "NFKC") for part in normalizers)
    return Reach(longest, longest * (_COMPOSED if composes else 1))


def _flat(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return [each for one in part[inner] for each in _flat(one, inner)] if part["type"] == "Sequence" else [part]


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    """Whether it makes no text shorter but by composing characters."""
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        return replaced is not None and len(normalizer["content"]) >= len(replaced)
    return normalizer["type"] in _KEEPING_NORMALIZERS or normalizer["type"] in ("NFC", "NFKC")


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEEPING_PRE_TOKENIZERS


def _knows_all(model: Mapping[str, Any], backend: Tokenizer, byte_level: bool) -> bool:
    """Whether each character becomes a part of a token: none is dropped, or fused with others that are not known."""
    vocab = backend.get_vocab()
    if model["type"] == "BPE" and byte_level:
        return vocab.keys() >= set(ByteLevel.alphabet())
    if model["type"] == "BPE" and model["unk_token"] is not None and not model["fuse_unk"]:
        return True
    bytes_known = model.get("byte_fallback") and vocab.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
    return model["type"] in ("BPE", "Unigram") and bool(bytes_known)
