"""How a chat template writes a chat, with special tokens from the template alone, never from the text of clients.

`Rendering` says what is written, and which arguments of the template clients may choose. A tokenizer takes the text of
a special token, such as `<|im_end|>`, for that token, wherever it stands: a message could end itself and begin another
one. So `Markers` puts a cut, a number that nobody can guess, into such text before the template gets it. What the
template then writes in one piece is a marker; what has a cut in it is text.

`TokenCache` remembers of owners the tokens of the parts of chats, so that a chat that grows is not tokenized again.
`KnownTools` remembers their lists of tools: those that are equal as JSON give equal prompts. A tokenizer cuts a text
at its special tokens before it does anything else: the tokens from one special token up to the next one are the same
whatever stands around them, if no special token takes white space of its neighbours.
"""

import copy
import hashlib
import inspect
import json
import re
import secrets
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from kvboost_hf.server.fair_share import FairCache

_NO_EFFORT = ("none", "minimal")
_KIMI_EFFORTS = ("low", "medium", "high", "max")  # others are refused by its template
# Not for clients: the arguments of the renderer, and the texts of special tokens.
RESERVED = frozenset(
    {
        "messages",
        *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
        *inspect.signature(render_jinja_template).parameters,
        *PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES,
    }
)
TextSpan = tuple[int, int]  # from, up to
_NUMBER = 10**16
_START_CHARS = 3
_NAMES = ("role", "type")  # of a few words, which templates compare
_ENTRY = 300  # bytes of an entry of a dict, with its keys, about
_PROBED = 8  # special tokens
_MOST_CHARS = 2**19  # of a list of tools that is remembered
_PROBES = ("{0}", "a{0}b", "a {0} b", "{0}\n\nb  {0}{0}", "é{0}  a\n{0}\tb. {0}", " a{0}user\n{{x}}", "\n{0}\n")

Owner = tuple[bytes, bytes]  # client and salt: what is kept for one is not used for another


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How a chat template writes a chat."""

    answer: bool = True  # whether the start of an answer is at its end
    # The field of the last message that the answer continues, such as `"content"`; None for none.
    continues: str | None = None
    # Other arguments of the template; those that it does not read change nothing.
    arguments: Mapping[str, Any] = field(default_factory=dict)


def reasoning_arguments(thinks: bool | None, effort: str | None) -> dict[str, Any]:
    """The arguments of chat templates that switch reasoning, as all families of models spell them.

    Args:
        thinks: Whether the model is to reason; None to decide it by `effort`.
        effort: How much; "none" and "minimal" switch reasoning off. None for what the template does.
    """
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if thinks is None and effort is not None:
        thinks = effort not in _NO_EFFORT
    if thinks is not None:
        found |= {"enable_thinking": thinks, "thinking": thinks}  # Qwen 3, SmolLM 3, GLM; DeepSeek, Granite, Kimi K3
        found["thinking_mode"] = "enabled" if thinks else "disabled"  # MiniMax M3
    if effort in _KIMI_EFFORTS:
        found["thinking_effort"] = effort
    return found


class ForgedMarkerError(ValueError):
    """A text contains that of a special token, and the tokenizer has no other tokens for it."""


class Markers:
    """The special tokens of a tokenizer. May be used by several threads.

    Those of one character are left alone: no template marks a message with them.
    """

    def __init__(self, tokenizer: Any) -> None:
        added: dict[int, AddedToken] = getattr(tokenizer, "added_tokens_decoder", {})
        self._tokens = {
            token.content: (number, token)
            for number, token in added.items()
            if token.special and len(token.content) > 1
        }
        texts = self._tokens
        self._starts = tuple({text[:_START_CHARS] for text in texts})
        self._longest = max(map(len, texts), default=1) - 1
        self._heads = frozenset(text[:n] for text in texts for n in range(1, len(text)))
        self._tails = frozenset(text[n:] for text in texts for n in range(1, len(text)))
        self._finder = _finder(list(texts))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Tokenizer | None = backend if isinstance(backend, Tokenizer) else None
        self._normalizer = getattr(self._backend, "normalizer", None)
        if not any(token.normalized for _, token in texts.values()):
            self._normalizer = None
        self._unknown = getattr(tokenizer, "unk_token_id", None)

    def find(self, text: str) -> list[TextSpan]:
        """Where special tokens are in a text, as tokenizers find them. The text is read without Python's lock."""
        if not any(start in text for start in self._starts):
            return []
        found = self._finder.encode_batch([text], add_special_tokens=False)[0]
        return [span for number, span in zip(found.ids, found.offsets, strict=True) if number]

    def cut(self, given: Any) -> "CutText | None":
        """Arguments of a chat template with a cut in text that could be read as a marker; None without such text."""
        cut = CutText(self, f"{secrets.randbelow(_NUMBER):016}")
        cut.given = cut.each(given)
        return cut if cut.changed else None

    def hidden(self, text: str) -> bool:
        """Whether the tokenizer makes the text of a special token of a text that has none, such as by its case."""
        return self._normalizer is not None and bool(self.find(self._normalizer.normalize_str(text)))

    def begins(self, text: str) -> bool:
        """Whether a text ends with what begins a special token."""
        return any(text[-n:] in self._heads for n in range(1, min(len(text), self._longest) + 1))

    def ends(self, text: str) -> bool:
        """Whether a text begins with what ends a special token."""
        return any(text[:n] in self._tails for n in range(1, min(len(text), self._longest) + 1))

    @cached_property
    def _apart(self) -> "_Apart":
        # Made when it is needed first: that takes long, and most servers never see such text.
        assert self._backend is not None
        return _Apart(self._backend, self._tokens)

    def encode(self, text: str, markers: Sequence[TextSpan]) -> list[int]:
        """Tokens of a text in which nothing else than `markers` is a special token, or `ForgedMarkerError`."""
        if self._backend is None:
            raise ForgedMarkerError("its tokenizer is none of the fast ones")
        ids = self._apart.encode(text, markers)
        special = {number for number, _ in self._tokens.values()} - {self._unknown}
        if sum(token in special for token in ids) > len(markers):
            raise ForgedMarkerError("its vocabulary has them as pieces of text, too")
        return ids


_OWN = f"own{secrets.token_hex(16)}own"
_OWN_TEXT = re.compile(f"{_OWN}([0-9a-f]*){_OWN}")


def own_text(text: str) -> str:
    """A text of the server's own for messages, in which special tokens are such; see `with_own_texts`."""
    return f"{_OWN}{text.encode().hex()}{_OWN}" if text else ""


def with_own_texts(rendered: str) -> str:
    """The output of a template with the texts that `own_text` has put into its messages."""
    return _OWN_TEXT.sub(lambda found: bytes.fromhex(found[1]).decode(), rendered)


class CutText:
    """The arguments of a template, with cuts.

    Attributes:
        given: For the template.
        hidden: Whether there is a text that the tokenizer would make that of a special token.
        changed: Whether there is one, or any cut.
    """

    def __init__(self, markers: Markers, number: str) -> None:
        self.given: Any = None
        self.changed = self.hidden = False
        self._markers, self._number = markers, number

    def each(self, given: Any) -> Any:
        """Cut all texts of `given`."""
        match given:
            case str():
                return self._at_borders(self._within(given))
            case dict():
                return {
                    self._within(name): self._within(value)
                    if name in _NAMES and isinstance(value, str)
                    else self.each(value)
                    for name, value in given.items()
                }
            case list() | tuple():
                return [self.each(one) for one in given]
        return given

    def markers(self, rendered: str) -> tuple[str, list[TextSpan]]:
        """The output of a template without the cuts, and the places of the template's special tokens in it."""
        cuts = [found.start() for found in re.finditer(self._number, rendered)]
        size = len(self._number)

        def moved(at: int) -> int:
            return at - size * bisect_left(cuts, at)

        spans = [(moved(start), moved(stop)) for start, stop in self._markers.find(rendered)]
        return rendered.replace(self._number, ""), spans

    def last(self, rendered: str, chars: int) -> str:
        """The end of a template's output, of `chars` characters without the cuts."""
        kept: list[str] = []
        for part in reversed(rendered.split(self._number)):
            kept.append(part[max(len(part) - chars, 0) :])
            chars -= len(kept[-1])
            if chars <= 0:
                break
        return self._number.join(reversed(kept))

    def _within(self, text: str) -> str:
        self.hidden = self.hidden or self._markers.hidden(text)
        self.changed = self.changed or self.hidden
        while found := self._markers.find(text):  # again, for those that overlap
            ends = [0, *(start + 1 for start, _ in found), len(text)]
            text = self._number.join(text[start:stop] for start, stop in pairwise(ends))
            self.changed = True
        return text

    def _at_borders(self, text: str) -> str:
        """With a cut where the template's own text could complete a special token."""
        before, behind = self._markers.ends(text), self._markers.begins(text)
        self.changed = self.changed or before or behind
        return self._number * before + text + self._number * behind


def texts_in(given: Any) -> Iterator[str]:
    """All texts in dicts and lists."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, dict):
        for name, value in given.items():
            yield name
            yield from texts_in(value)
    elif isinstance(given, list | tuple):
        for one in given:
            yield from texts_in(one)


def forget_words(tokenizer: Any) -> bool:
    """Empty the memory of a tokenizer; returns False where it cannot be emptied.

    It encodes words faster that it has encoded before, so that time tells them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        return False
    if isinstance(backend.model, BPE | Unigram):  # the others have none
        backend.model._clear_cache()
    return True


class _Apart:
    """A tokenizer for which special tokens are text, and other texts, that nobody can guess, those tokens."""

    def __init__(self, backend: Tokenizer, tokens: dict[str, tuple[int, AddedToken]]) -> None:
        self._backend = copy.deepcopy(backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        secret = f"{secrets.randbits(128):039}"
        self._names = {text: f"marker{secret}n{n}n" for n, text in enumerate(tokens)}
        self._ids: dict[int, int] = {}
        for text, (number, token) in tokens.items():
            name = self._names[text]
            self._backend.add_tokens(
                [
                    AddedToken(
                        name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized, special=False
                    )
                ]
            )
            taken = self._backend.token_to_id(name)
            assert taken is not None
            self._ids[taken] = number

    def encode(self, text: str, markers: Sequence[TextSpan]) -> list[int]:
        pieces, end = list[str](), 0
        for start, stop in markers:
            pieces += [text[end:start], self._names[text[start:stop]]]
            end = stop
        forget_words(self._backend)
        found = self._backend.encode_batch(["".join([*pieces, text[end:]])], add_special_tokens=False)[0]
        return [self._ids.get(token, token) for token in found.ids]


def _finder(texts: Sequence[str]) -> Tokenizer:
    """Finds texts as tokenizers find special tokens: of two, the first, and of two at one place, the longer one."""
    finder = Tokenizer(WordLevel({"": 0}, unk_token=""))
    finder.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in texts])
    return finder


class TokenCache:
    """Tokenizes texts, and keeps the tokens of their parts. May be used by several threads.

    What a client has not used for the longest time is given up beyond `max_bytes`.

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
        """Tokens of a text, without those that the tokenizer puts around texts. Special tokens in it are such."""
        if not self.works:
            return _encode(tokenizer, text)
        found: list[int] = []
        unknown: list[str] = []  # parts in a row
        for part in self._parts(text):
            with self._lock:
                known = self._kept.get(owner[0], (owner[1], part))
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
        """Tools in the order of keys in which their owner has sent them first, and whether that is another one."""
        given = json.dumps(tools)
        if not tools or len(given) > _MOST_CHARS:
            return tools, False
        key = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).digest()
        with self._lock:
            first = self._lists.get(owner, key)
            if first is None:
                self._lists.put(owner, key, given)
        return (tools, False) if first in (None, given) else (json.loads(str(first)), True)
