"""Column ids, how sequences of them are cut into chunks, and the keys that chunks are found under.

A chunk is a half-open interval [start, stop) of at most `chunk_size` tokens. It is found in two ways:

- by its *prefix key*, chained over all chunks before it: equal keys mean equal tokens, positions and history;
- by its *content*, its tokens alone, at any position. A chunk whose K/V was computed alone, or behind moved K/V, is
  found only in this way.

All keys start from a root, which contains the model's fingerprint and the caller's salt, so that another model,
adapter or tenant never matches. Keys are BLAKE2b digests; the tokens of a chunk found by key are compared before it is
used, so that a collision cannot match.

A column id is the int64 that represents a column of a prompt wherever prompts are compared, hashed and stored. K/V of
a text token depends on the tokens before it, so its token id is enough. K/V of an image, sound or video depends on
what is shown, and models with three-dimensional rotary positions shift the positions of text behind an image by an
amount that the image decides. A column id carries both, so that code that works on token ids needs no special case:

    text                         token id
    text with shifted positions  token id + (shift << 32)
    image, sound or video        a number below -2**62, from the hash of what is shown

Text behind an image keeps its token id (shift aside), because its history includes the image's column ids.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b, shake_256
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

KEY_BYTES = 20
CODE_BYTES = 4  # of a column id in `text_of`
_ID_BITS = 32
_MEDIA = -(2**62)  # ids of media are below this one, all others above
# With `ReusePolicy(reproducible=True)`, columns [k * PIECE, (k + 1) * PIECE) are computed in one forward, whether or
# not a prompt is reused: matrix products of other shapes round differently, so that the last bits of a token's K/V
# depend on the forward that computes it.
PIECE = 256
LEAST_CHUNK_SIZE = 32
HEAD_TOKENS = 8  # leading tokens by which a chunk is looked up: no chunk is shorter, none serves fewer
_SHORTEST_BY_CONTENT = 16
_HASHED = 4  # tokens before a place that tell how good it is
FACTOR = np.uint64(0x9E3779B97F4A7C15)
_TEXT_BEFORE = 32  # tokens: K/V hardly depends on what is farther away, and templates have no text as long
HALF = np.uint64(32)
_SENTENCE_END, _SEPARATOR = np.uint8(1), np.uint8(2)
_SENTENCE_MARKS = (".", "!", "?", "…", "。", "！", "？", "．", "｡", "।", "؟")  # noqa: RUF001
_CLOSING = " \t\"'”’»)]}*_」』）】》"  # noqa: RUF001


def shifted_ids(ids: Tokens, shifts: NDArray[np.int64]) -> Tokens:
    """Column ids of text `ids` whose positions are `shifts` more than their place in the row."""
    return ids + (shifts << _ID_BITS)


def media_ids(seed: bytes, columns: int) -> Tokens:
    """Column ids of `columns` columns of one image, sound or video, drawn from `seed`, a hash of all it shows."""
    drawn = np.frombuffer(shake_256(seed).digest(8 * columns), dtype="<u8")
    ids: Tokens = _MEDIA - 1 - (drawn >> np.uint64(2)).astype(np.int64)
    return ids


def is_text(column_ids: Tokens) -> bool:
    """Whether all columns are of text, so that their ids are those of tokens."""
    return np.array_equal(text_ids(column_ids), column_ids)


def text_ids(column_ids: Tokens) -> Tokens:
    """Token ids of text columns, and -1 for media."""
    return np.where(column_ids < _MEDIA, -1, column_ids & (2**_ID_BITS - 1))


def text_of(column_ids: Tokens) -> bytes:
    """Column ids in `CODE_BYTES` each, to be compared and sorted: of text as they are, others hashed."""
    codes = column_ids.astype(np.int32)
    other = codes != column_ids
    if other.any():
        codes[other] = -1 - ((column_ids[other].view(np.uint64) * FACTOR) >> np.uint64(33)).astype(np.int32)
    return codes.tobytes()


class _Packed(Protocol):
    @property
    def ids(self) -> Tokens | bytes: ...


def tokens_in(chunk: _Packed) -> Tokens:
    """Column ids of a chunk that may have them `packed`, [tokens], int64; not to be written to."""
    ids = chunk.ids
    return np.frombuffer(ids, dtype=np.int32).astype(np.int64) if isinstance(ids, bytes) else ids


def text_in(chunk: _Packed) -> bytes:
    """The `text_of` a chunk that may have it `packed`."""
    return chunk.ids if isinstance(chunk.ids, bytes) else text_of(chunk.ids)


def packed(column_ids: Tokens) -> bytes | Tokens:
    """A copy of column ids that takes as little as it can: their `text_of`, if that tells all of them."""
    text = text_of(column_ids)
    return text if np.array_equal(np.frombuffer(text, dtype=np.int32), column_ids) else column_ids.copy()


def digest(*parts: bytes, size: int = KEY_BYTES) -> bytes:
    """One BLAKE2b digest of several byte strings, each with its length before it."""
    found = blake2b(digest_size=size)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def root_key(fingerprint: bytes, salt: bytes, regime: bytes = b"") -> bytes:
    """The key before the first chunk: all that K/V depends on besides tokens, and the caller's salt."""
    return digest(b"root", fingerprint, salt, regime)


def root_beside(root: bytes, mark: bytes) -> bytes:
    """The key before the first chunk of what others than the model compute of texts under `root`; `mark` says who.

    It begins with `begin_beside(root)`, so that all of them can be found, whoever they are of.
    """
    begin = begin_beside(root)
    return begin + digest(b"beside", root, mark, size=KEY_BYTES - len(begin))


def begin_beside(root: bytes) -> bytes:
    """The first half of all roots beside `root`, of whose texts it tells nothing."""
    return digest(b"beside", root, size=KEY_BYTES // 2)


def prefix_key(parent: bytes, tokens: Tokens) -> bytes:
    """The key of a chunk with this history: `parent` is the prefix key of the chunk before, or the root."""
    return digest(parent, tokens.tobytes())


def states_key(parent: bytes, tokens: Tokens) -> bytes:
    """The key of the states after `tokens`, which follow the chunk border with prefix key `parent`."""
    return digest(b"states", parent, tokens.tobytes())


def content_only_key(root: bytes, parent: bytes, start: int, tokens: Tokens) -> bytes:
    """The key of a chunk that is found by its content only, with `start` tokens before it.

    `parent` is the key of the chunk that it was computed directly behind, of either kind, or bytes that name its
    history.
    """
    return digest(b"content only", root, parent, start.to_bytes(8, "little"), tokens.tobytes())


def text_key(tokens: Tokens, start: int) -> bytes:
    """A name for the text directly before row token `start`: the last `_TEXT_BEFORE` tokens of it.

    A chunk that is found by its content only has it for a parent where no key of a chunk is known.
    """
    return digest(b"text before", tokens[max(0, start - _TEXT_BEFORE) : start].tobytes())


def common_length(a: Tokens, b: Tokens) -> int:
    """How many leading tokens `a` and `b` share."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


class Chunker(Protocol):
    """Where a token sequence is cut. Cuts may depend on the tokens after the last cut, never on what is stored."""

    chunk_size: int  # no chunk is longer

    def next_cut(self, tokens: Tokens, start: int) -> int | None:
        """The end of the chunk that starts at `start`, or None while `tokens` is too short to tell."""
        ...


class FixedChunker:
    """Cuts at every multiple of `chunk_size` tokens.

    Args:
        chunk_size: Tokens per chunk, a positive multiple of 16.

    Raises:
        ValueError: for any other `chunk_size`.
    """

    def __init__(self, chunk_size: int = 128) -> None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size <= 0 or chunk_size % 16:
            raise ValueError(f"`chunk_size` must be a positive multiple of 16 tokens, got {chunk_size!r}.")
        self.chunk_size = chunk_size

    def next_cut(self, tokens: Tokens, start: int) -> int | None:
        stop = start + self.chunk_size
        return stop if stop <= len(tokens) else None


class ContentChunker:
    """Cuts at boundaries that the content defines: separators, message headers, hashes, ends of sentences.

    `FixedChunker` cuts at multiples of a length, so that one more token at the start of a prompt moves every cut, and
    no chunk of the two prompts is the same. A `ContentChunker` derives a cut from the tokens around it and from the
    cut before, so that cuts soon realign after a change:

    1. It cuts after a separator or the header of a chat message, if the next `chunk_size` tokens contain one.
    2. Otherwise it cuts behind the four tokens with the largest hash, such that the chunk has between a quarter of
       `chunk_size` and `chunk_size` tokens. Two prompts with the same text agree as soon as their ranges share a
       maximum.
    3. It moves a cut by hash to the end of a sentence close by.

    Content-defined chunking goes back to Muthitacharoen et al. (LBFS, SOSP 2001). Measured on 20 texts of 4000 random
    tokens (Zipf, exponent 1.3) with `chunk_size` 128: chunks have 84 tokens in the mean (standard deviation 27), and
    after another start cuts fall together again after 100 tokens in the mean (151 in nine of ten). Waiting for a
    maximum within 32 tokens on both sides gave chunks of 62 tokens, 73 tokens until cuts agree, and 15% of the cuts
    without such a place.

    Args:
        chunk_size: Longest chunk in tokens, a multiple of 16, at least 32.
        boundary_window: A cut found by hash moves up to so many tokens to the nearest of `sentence_ends`.
        sentence_ends: Ids of tokens that end a sentence.
        separators: Sequences of ids after which a cut is always made, if at least 8 tokens follow the last cut.

    Raises:
        ValueError: for a bad `chunk_size` or `boundary_window`, an id that is none, or an empty separator.

    Example:
        >>> chunker = ContentChunker(32, separators=[(7,)])
        >>> chunker.next_cut(np.array([*range(10, 20), 7, *range(20, 40)]), 0)
        11
    """

    def __init__(
        self,
        chunk_size: int = 128,
        *,
        boundary_window: int = 0,
        sentence_ends: Iterable[int] = (),
        separators: Iterable[Sequence[int]] = (),
    ) -> None:
        if not _is_int(chunk_size) or chunk_size < LEAST_CHUNK_SIZE or chunk_size % 16:
            raise ValueError(
                f"`chunk_size` must be a multiple of 16 tokens, at least {LEAST_CHUNK_SIZE}, got {chunk_size!r}."
            )
        if not _is_int(boundary_window) or not 0 <= boundary_window < chunk_size:
            raise ValueError(
                f"`boundary_window` must be from 0 to {chunk_size - 1} tokens, less than `chunk_size`, got "
                f"{boundary_window!r}. Pass 0 to cut in the middle of sentences."
            )
        given = list(separators)
        if wrong := [part for part in given if isinstance(part, int)]:
            raise ValueError(f"`separators` must hold sequences of ids, got {wrong[0]}. Pass [({wrong[0]},)].")
        parts = [tuple(part) for part in given]
        if not all(parts):
            raise ValueError("`separators` must hold sequences of one id or more, got an empty one. Leave it out.")
        self.chunk_size = chunk_size
        self.boundary_window = boundary_window
        self._shortest = max(_SHORTEST_BY_CONTENT, chunk_size // 4)
        self._sequences = [_checked_ids("separators", part) for part in parts if len(part) > 1]
        self._marks = _mark_table(
            {
                _SENTENCE_END: _checked_ids("sentence_ends", sentence_ends),
                _SEPARATOR: _checked_ids("separators", [part[0] for part in parts if len(part) == 1]),
            }
        )

    @classmethod
    def for_tokenizer(
        cls, tokenizer: Any, chunk_size: int = 128, boundary_window: int = 16, separators: Iterable[str] = ("\n\n",)
    ) -> "ContentChunker":
        """A chunker for the sentence ends, separators and message headers of a tokenizer.

        The vocabulary is read once, which takes about a second for 150,000 tokens. Headers are learned from the chat
        template, if there is one: a cut behind them lets the text of a message match behind other headers.

        Args:
            tokenizer: A tokenizer of transformers.
            chunk_size: As `ContentChunker` has it, and so `boundary_window`.
            boundary_window: As above.
            separators: Texts after which a cut is always made.

        Raises:
            ValueError: as above, or for an empty separator.

        Example:
            >>> from kvboost_hf.assets import load_embedded
            >>> _, tokenizer = load_embedded()
            >>> chunker = ContentChunker.for_tokenizer(tokenizer)
            >>> turn = [{"role": "user", "content": "Where does Anna live? Who knows?"}]
            >>> tokens = np.array(tokenizer.apply_chat_template(2 * turn)["input_ids"])
            >>> tokenizer.decode(tokens[: chunker.next_cut(tokens, 0)])
            '<|im_start|>user\\nWhere does Anna live? Who knows?<|im_end|>\\n<|im_start|>user\\n'
        """
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], clean_up_tokenization_spaces=False)
        if isinstance(separators, str):
            raise ValueError(f"`separators` must be a sequence of texts, got the text {separators!r}. Pass [text].")
        parts: set[tuple[int, ...]] = set()
        for separator in separators:
            if not separator:
                raise ValueError("`separators` must hold texts of one character or more, got ''. Leave it out.")
            parts |= {(i,) for i, text in enumerate(texts) if text.endswith(separator)}
            parts.add(_ids_of(tokenizer, separator))
        return cls(
            chunk_size,
            boundary_window=boundary_window,
            sentence_ends=[i for i, text in enumerate(texts) if _ends_sentence(text)],
            separators=sorted((parts | _message_headers(tokenizer)) - {()}),  # some have no tokens for white space
        )

    def next_cut(self, tokens: Tokens, start: int) -> int | None:
        window = tokens[start : start + self.chunk_size]
        marks = None
        if self._marks is not None or self._sequences:
            ids = text_ids(window)
            marks = self._marks.take(ids + 1, mode="clip") if self._marks is not None else None
            boundary = self._boundary(ids, marks)
            if boundary is not None:
                return start + boundary
        if len(window) < self.chunk_size:
            return None
        return start + self._slide(_best_place(window, self._shortest), marks)

    def _boundary(self, ids: Tokens, marks: NDArray[np.uint8] | None) -> int | None:
        """The first separator or header. More tokens cannot reveal an earlier one."""
        found: list[int] = []
        if marks is not None:
            if (after := np.flatnonzero(marks[HEAD_TOKENS - 1 :] & _SEPARATOR)).size:
                found.append(HEAD_TOKENS + int(after[0]))
        for sequence in self._sequences:
            first = max(HEAD_TOKENS - len(sequence), 0)
            places = max(len(ids) - len(sequence) + 1 - first, 0)
            equal = ids[first : first + places] == sequence[0]
            for k in range(1, len(sequence)):
                equal &= ids[first + k : first + k + places] == sequence[k]
            if equal.any():
                found.append(first + len(sequence) + int(equal.argmax()))
        return min(found, default=None)

    def _slide(self, cut: int, marks: NDArray[np.uint8] | None) -> int:
        """The end of a sentence nearest to `cut`, the earlier of two, or `cut` if none is near."""
        if marks is None or not self.boundary_window:
            return cut
        first = max(cut - self.boundary_window, _SHORTEST_BY_CONTENT)
        ends = first + np.flatnonzero(marks[first - 1 : cut + self.boundary_window] & _SENTENCE_END)
        return int(ends[np.abs(ends - cut).argmin()]) if ends.size else cut


def whole_pieces(columns: int) -> int:
    """The last column, at most `columns`, at which a piece ends.

    Example:
        >>> whole_pieces(700)
        512
    """
    return columns - columns % PIECE


def piece_ends(filled: int, limit: int) -> list[int]:
    """The columns behind `filled`, up to `limit`, whose logits are wanted, at which whole pieces end."""
    return list(range(filled + PIECE, limit + 1, PIECE))


def _best_place(window: Tokens, shortest: int) -> int:
    """The last place in [shortest, len(window)] whose `_HASHED` tokens before it have the largest hash."""
    mixed = window[shortest - _HASHED :].view(np.uint64) * FACTOR
    mixed ^= mixed >> HALF
    places = len(mixed) - _HASHED + 1
    hashed = mixed[:places].copy()
    for k in range(1, _HASHED):
        hashed *= FACTOR
        hashed += mixed[k : k + places]
    hashed ^= hashed >> HALF
    hashed *= FACTOR
    return len(window) - int(hashed[::-1].argmax())


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_ids(name: str, ids: Iterable[int]) -> Tokens:
    found = list(ids)
    for i in found:
        if not isinstance(i, int | np.integer) or isinstance(i, bool) or not 0 <= i < 2**32:
            raise ValueError(f"`{name}` must hold token ids, ints from 0 on, got {i!r}.")
    return np.array(found, dtype=np.int64)


def _mark_table(marked: dict[np.uint8, Tokens]) -> NDArray[np.uint8] | None:
    """The marks of each id as bits, at index id + 1: the first entry is for media, the last for all larger ids."""
    largest = max((int(ids.max()) for ids in marked.values() if ids.size), default=None)
    if largest is None:
        return None
    table = np.zeros(largest + 3, dtype=np.uint8)
    for mark, ids in marked.items():
        table[ids + 1] |= mark
    return table


def _ends_sentence(text: str) -> bool:
    return "\n" in text or text.rstrip(_CLOSING).endswith(_SENTENCE_MARKS)


def _ids_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The ids of a text inside a longer one; some tokenizers mark the start of a text."""
    lead = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a" + text, add_special_tokens=False)["input_ids"]
    if ids[: len(lead)] != lead:  # merged with what comes before it
        ids, lead = tokenizer(text, add_special_tokens=False)["input_ids"], []
    return tuple(ids[len(lead) :])


def _message_headers(tokenizer: Any) -> set[tuple[int, ...]]:
    """The header of each message of a chat, from its last special token on."""
    special = set(tokenizer.get_added_vocab().values())
    said = ("4711", "8153", "6029")
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), said, strict=True)]
    try:
        rest = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, ValueError):  # no template, one that takes other chats, or one of several
        return set()
    headers: set[tuple[int, ...]] = set()
    for text in said:
        before, _, rest = rest.partition(text)
        ids = tokenizer(before, add_special_tokens=False)["input_ids"]
        last = max((at for at, i in enumerate(ids) if i in special), default=None)
        if last is not None:
            headers.add(tuple(ids[last:]))
    return headers
