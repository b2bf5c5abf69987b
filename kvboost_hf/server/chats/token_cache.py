"""Remembers of owners the tokens of the parts of chats (`TokenCache`), and lists of tools (`KnownTools`).

So a chat that grows is not tokenized again, and lists of tools that are equal as JSON give equal prompts.

A tokenizer cuts a text at its special tokens before it does anything else. So the tokens from one special token up to
the next one are the same whatever stands around them, if no special token takes white space of its neighbours.
"""

import hashlib
import json
import re
import sys
from array import array
from collections.abc import Iterator
from itertools import pairwise
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

from kvboost_hf.server.fair_share import FairCache

_ENTRY = 300  # bytes of an entry of a dict, with its keys, about
_PROBED = 8  # special tokens
_MOST_CHARS = 2**19  # of a list of tools that is remembered
_PROBES = ("{0}", "a{0}b", "a {0} b", "{0}\n\nb  {0}{0}", "é{0}  a\n{0}\tb. {0}", " a{0}user\n{{x}}", "\n{0}\n")

Owner = tuple[bytes, bytes]  # client and salt: what is kept for one is not used for another


class TokenCache:
    """Tokenizes texts, and keeps the tokens of their parts. May be used by several threads.

    Args:
        tokenizer: The tokenizer of the model.
        max_bytes: What is kept for one client, at most; what was not used for the longest time is given up.

    Attributes:
        works: Whether anything is kept: a few texts that are tokenized at the start have shown that the parts of this
            tokenizer's texts do not depend on each other.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> _, tokenizer = load_embedded()
        >>> cache = TokenCache(tokenizer, 2**20)
        >>> text = "<|im_start|>user\\nWho?<|im_end|>"
        >>> cache.encode(tokenizer, text, (b"", b"")) == tokenizer.encode(text, add_special_tokens=False)
        True
    """

    def __init__(self, tokenizer: Any, max_bytes: int) -> None:
        self._lock = Lock()
        self._kept: FairCache[bytes, array[int]] = FairCache(most_of_one=max_bytes, size=_size)
        first = [token for token in getattr(tokenizer, "added_tokens_decoder", {}).items() if not token[1].normalized]
        self._cuts = {token.content: number for number, token in first if token.special}
        self._ids = frozenset(self._cuts.values())
        # As tokenizers find them: of two, the first, and of two at one place, the longer one.
        texts = sorted((token.content for _, token in first), key=len, reverse=True)
        self._finder = re.compile("|".join(map(re.escape, texts)))
        takes_more = any(token.lstrip or token.rstrip or token.single_word for _, token in first)
        fast = isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer)
        self.works = fast and bool(self._cuts) and not takes_more and self._is_exact(tokenizer)

    def encode(self, tokenizer: Any, text: str, owner: Owner) -> list[int]:
        """Tokens of a text, without those that the tokenizer puts around texts.

        Args:
            tokenizer: That of the model, or a copy.
            text: The text. Special tokens in it are such.
            owner: Who asks.
        """
        if not self.works:
            return _encode(tokenizer, text)
        found: list[int] = []
        unknown: list[str] = []  # parts in a row
        for part in self._parts(text):
            known = self._get(owner, part)
            if known is None:
                unknown.append(part)
                continue
            found += self._new(tokenizer, unknown, owner)
            found += known
            unknown = []
        return found + self._new(tokenizer, unknown, owner)

    def _parts(self, text: str) -> Iterator[str]:
        """The text, cut before each special token."""
        starts = [match.start() for match in self._finder.finditer(text) if match[0] in self._cuts]
        for start, stop in pairwise((0, *starts, len(text))):
            if start < stop:
                yield text[start:stop]

    def _new(self, tokenizer: Any, parts: list[str], owner: Owner) -> list[int]:
        """Tokens of parts in a row, which are kept."""
        if not parts:
            return []
        ids = _encode(tokenizer, "".join(parts))
        starts = [at for at, token in enumerate(ids) if token in self._ids]
        head = [] if self._begins(parts[0]) else [0]  # the beginning of a text has no special token
        if len(head) + len(starts) == len(parts):  # not so if a special token stands for unknown characters, too
            stops = (*head, *starts, len(ids))
            with self._lock:
                for part, (start, stop) in zip(parts, pairwise(stops), strict=True):
                    self._kept.put(owner[0], (owner[1], part), array("q", ids[start:stop]))
        return ids

    def _begins(self, part: str) -> bool:
        found = self._finder.match(part)
        return found is not None and found[0] in self._cuts

    def _get(self, owner: Owner, part: str) -> "array[int] | None":
        with self._lock:
            return self._kept.get(owner[0], (owner[1], part))

    def _is_exact(self, tokenizer: Any) -> bool:
        for special in list(self._cuts)[:_PROBED]:
            for probe in _PROBES:
                text = probe.format(special)
                parts = [token for part in self._parts(text) for token in _encode(tokenizer, part)]
                if parts != _encode(tokenizer, text):
                    return False
        return True


def _size(key: Any, ids: "array[int]") -> int:
    return sys.getsizeof(key[1]) + sys.getsizeof(ids) + _ENTRY


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


class KnownTools:
    """The lists of tools that each owner has sent, in the order of keys in which they came first. Safe for threads.

    Clients that keep schemas in maps without an order send the same tools in another order after each start. Tools
    stand at the beginning of prompts, so that nothing behind them would be found.

    Example:
        >>> known, owner = KnownTools(), (b"key", b"salt")
        >>> known.ordered([{"name": "look", "type": "function"}], owner)
        ([{'name': 'look', 'type': 'function'}], False)
        >>> known.ordered([{"type": "function", "name": "look"}], owner)
        ([{'name': 'look', 'type': 'function'}], True)
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._lists: FairCache[Owner, str] = FairCache(256, 16)  # by a hash of what does not depend on the order

    def ordered(self, tools: list[dict[str, Any]], owner: Owner) -> tuple[list[dict[str, Any]], bool]:
        """Tools in the order of keys in which their owner has sent them first, and whether that is another one.

        Args:
            tools: As chat templates take them. The order of lists in them counts, and stays.
            owner: Who asks. Nothing is known of the lists of others.
        """
        given = json.dumps(tools)
        if not tools or len(given) > _MOST_CHARS:
            return tools, False
        key = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).digest()
        with self._lock:
            first = self._lists.get(owner, key)
            if first is None:
                self._lists.put(owner, key, given)
        return (tools, False) if first in (None, given) else (json.loads(str(first)), True)
