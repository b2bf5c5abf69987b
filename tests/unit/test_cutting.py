"""Cuts depend on the content after the last cut, are never taken back, and soon fall again where they fell."""

from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_hf.assets import load_embedded
from tests.internals.cache import ContentChunker, Tokens, media_ids, shifted_ids

pytestmark = pytest.mark.daily

END, NEWLINE, START = 3, 4, 5  # a sentence's end, half of a separator, the start of a message


def text(n: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(10, 200, n)


def cuts(chunker: ContentChunker, tokens: Tokens, start: int = 0) -> list[int]:
    found: list[int] = []
    while (cut := chunker.next_cut(tokens, start)) is not None:
        found.append(cut)
        start = cut
    return found


CHUNKERS = {
    "content": ContentChunker(64),
    "sentences": ContentChunker(64, boundary_window=16, sentence_ends=[END]),
    "separators": ContentChunker(
        64, boundary_window=8, sentence_ends=[END], separators=[(NEWLINE, NEWLINE), (6,), (START, 7, NEWLINE)]
    ),
}
short_vocabulary = st.lists(st.integers(2, 8), max_size=250).map(lambda ids: np.array(ids, dtype=np.int64))


@pytest.mark.parametrize("name", CHUNKERS)
@given(tokens=short_vocabulary, start=st.integers(0, 30))
def test_a_cut_is_never_taken_back(name: str, tokens: Tokens, start: int) -> None:
    """Whatever follows: once there is an answer it stays, and it never needs more than `chunk_size` tokens."""
    chunker = CHUNKERS[name]
    seen: set[int] = set()
    for n in range(start, len(tokens) + 1):
        cut = chunker.next_cut(tokens[:n], start)
        if cut is not None:
            seen.add(cut)
            assert start + 8 <= cut <= min(n, start + 64)
        else:
            assert not seen
            assert n - start < 64
    assert len(seen) <= 1


@pytest.mark.parametrize("name", CHUNKERS)
@given(before=short_vocabulary, tokens=short_vocabulary)
def test_what_is_before_the_last_cut_has_no_say(name: str, before: Tokens, tokens: Tokens) -> None:
    chunker = CHUNKERS[name]
    moved = chunker.next_cut(np.concatenate([before, tokens]), len(before))
    cut = chunker.next_cut(tokens, 0)
    assert moved == (None if cut is None else len(before) + cut)


@given(seed=st.integers(0, 10_000), dropped=st.integers(1, 200))
def test_cuts_agree_again_after_another_start(seed: int, dropped: int) -> None:
    """Of cuts at multiples of 128, none would."""
    chunker = ContentChunker(128)
    tokens = text(3000, seed)
    after = {dropped + cut for cut in cuts(chunker, tokens[dropped:])}
    assert len(set(cuts(chunker, tokens)) & after) > 15


def test_chunks_are_neither_short_nor_all_of_one_length() -> None:
    lengths = np.diff([0, *cuts(ContentChunker(128), text(100_000))])
    assert 32 <= lengths.min() <= lengths.max() <= 128
    assert 75 < lengths.mean() < 95
    assert 20 < lengths.std() < 35


def test_a_text_of_one_token_is_cut_into_long_chunks() -> None:
    assert cuts(ContentChunker(64), np.full(200, 7)) == [64, 128, 192]


class TestBoundaries:
    def test_a_separator_is_cut_after(self) -> None:
        tokens = text(200)
        tokens[[20, 50]] = 6
        chunker = ContentChunker(64, separators=[(6,)])
        assert cuts(chunker, tokens)[:2] == [21, 51]
        assert chunker.next_cut(tokens[:21], 0) == 21  # certain at once
        assert chunker.next_cut(tokens[:20], 0) is None

    def test_one_of_several_ids(self) -> None:
        tokens = text(200)
        tokens[[19, 30, 31]] = NEWLINE
        assert ContentChunker(64, separators=[(NEWLINE, NEWLINE)]).next_cut(tokens, 0) == 32

    @pytest.mark.parametrize(("at", "cut"), [(6, None), (7, 8)])
    def test_not_before_eight_tokens(self, at: int, cut: int | None) -> None:
        tokens = text(60)
        tokens[at] = 6
        assert ContentChunker(64, separators=[(6,)]).next_cut(tokens, 0) == cut

    def test_a_sequence_that_began_before_the_last_cut_is_none(self) -> None:
        long = tuple(range(300, 312))
        tokens = np.concatenate([np.array(long), text(100)])
        assert ContentChunker(64, separators=[long]).next_cut(tokens, 0) == 12
        assert ContentChunker(64, separators=[long]).next_cut(tokens, 4) != 12

    @given(seed=st.integers(0, 1000), ends=st.sets(st.integers(0, 63), max_size=6))
    def test_a_cut_slides_to_the_nearest_sentence_end(self, seed: int, ends: set[int]) -> None:
        tokens = text(64, seed)
        plain = ContentChunker(64)
        tokens[list(ends)] = END
        unmoved = plain.next_cut(tokens, 0)
        assert unmoved is not None
        near = [end + 1 for end in ends if abs(end + 1 - unmoved) <= 10 and end + 1 >= 16]
        expected = min(near, key=lambda cut: (abs(cut - unmoved), cut), default=unmoved)
        assert ContentChunker(64, boundary_window=10, sentence_ends=[END]).next_cut(tokens, 0) == expected

    def test_ids_behind_codes_are_looked_at_and_media_is_none(self) -> None:
        chunker = ContentChunker(64, separators=[(0,), (NEWLINE, NEWLINE)])
        media = media_ids(b"an image", 30)
        assert chunker.next_cut(media, 0) is None
        rest = text(20)
        rest[[10, 11]] = NEWLINE
        row = np.concatenate([media, shifted_ids(rest, np.full(20, -17))])
        assert chunker.next_cut(row, 0) == 42


def test_a_cut_may_be_at_any_place_from_a_quarter_of_a_chunk_on() -> None:
    found = {ContentChunker(96).next_cut(text(96, seed), 0) for seed in range(1500)}
    assert found == set(range(24, 97))


class TestForTokenizer:
    tokenizer = load_embedded()[1]

    @cached_property
    def chunker(self) -> ContentChunker:
        return ContentChunker.for_tokenizer(self.tokenizer)

    def pieces(self, tokens: Tokens) -> list[str]:
        borders = [0, *cuts(self.chunker, tokens), len(tokens)]
        return [self.tokenizer.decode(tokens[a:b]) for a, b in pairwise(borders)]

    def ids(self, shown: str) -> Tokens:
        return np.array(self.tokenizer(shown, add_special_tokens=False)["input_ids"])

    def test_paragraphs(self) -> None:
        paragraphs = ["Anna lives in Oslo. She plays the piano.\n\n", "Tom has a red lamp and two goats.\n\n", "Who?"]
        assert self.pieces(self.ids("".join(paragraphs))) == paragraphs

    def test_messages(self) -> None:
        turns = [
            {"role": "user", "content": "Anna lives in Oslo. Where does Anna live?"},
            {"role": "assistant", "content": "Anna lives in Oslo."},
            {"role": "user", "content": "What does Tom have?"},
        ]
        tokens = np.array(self.tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"])  # type: ignore[call-overload, index]
        pieces = self.pieces(tokens)
        assert [piece.split("<|im_end|>")[0] for piece in pieces[1:]] == [
            "Anna lives in Oslo.",
            "What does Tom have?",
            "",
        ]
        assert all(piece.endswith(("<|im_start|>user\n", "<|im_start|>assistant\n")) for piece in pieces[:-1])
        other = ["The end of a message is not a part of the header of the next one: <|im_start|>assistant\n", "So?"]
        assert self.pieces(self.ids("".join(other))) == other

    def test_sentences(self) -> None:
        """A paragraph that is too long is cut at the ends of its sentences."""
        pieces = self.pieces(self.ids("Anna lives in Oslo. Tom has a red lamp! Does Ben play the piano? " * 20))
        assert len(pieces) > 3
        assert all(piece.endswith((".", "!", "?")) for piece in pieces[:-1])

    def test_without_a_chat_template(self) -> None:
        tokenizer = load_embedded()[1]
        tokenizer.chat_template = None
        tokens = self.ids("Anna lives in Oslo. Tom has a lamp.<|im_start|>Who?")
        assert ContentChunker.for_tokenizer(tokenizer).next_cut(tokens, 0) is None

    def test_an_empty_separator(self) -> None:
        with pytest.raises(ValueError, match=r"`separators` must hold texts of one character or more, got ''\."):
            ContentChunker.for_tokenizer(self.tokenizer, separators=[""])
        with pytest.raises(ValueError, match=r"must be a sequence of texts, got the text 'ab'\. Pass \[text\]\."):
            ContentChunker.for_tokenizer(self.tokenizer, separators="ab")


_BAD: list[tuple[dict[str, Any], str]] = [
    ({"chunk_size": 16}, r"`chunk_size` must be a multiple of 16 tokens, at least 32, got 16\."),
    ({"chunk_size": 100}, r"`chunk_size` must be a multiple of 16 tokens, at least 32, got 100\."),
    ({"chunk_size": "128"}, r"`chunk_size` must be a multiple of 16 tokens, at least 32, got '128'\."),
    ({"boundary_window": 128}, r"`boundary_window` must be from 0 to 127 tokens, .*, got 128\. Pass 0 "),
    ({"boundary_window": -1}, r"`boundary_window` must be from 0 to 127 tokens, .*, got -1\."),
    ({"sentence_ends": [-1]}, r"`sentence_ends` must hold token ids, ints from 0 on, got -1\."),
    ({"sentence_ends": [2**32]}, r"`sentence_ends` must hold token ids, ints from 0 on, got 4294967296\."),
    ({"sentence_ends": [True]}, r"`sentence_ends` must hold token ids, ints from 0 on, got True\."),
    ({"separators": [("<s>",)]}, r"`separators` must hold token ids, ints from 0 on, got '<s>'\."),
    ({"separators": [5]}, r"`separators` must hold sequences of ids, got 5\. Pass \[\(5,\)\]\."),
    ({"separators": [()]}, r"`separators` must hold sequences of one id or more, got an empty one\."),
    ({"separators": [(1, None)]}, r"`separators` must hold token ids, ints from 0 on, got None\."),
]


def test_bad_arguments() -> None:
    """All of them in each run, for each is about a guard of its own."""
    for arguments, message in _BAD:
        with pytest.raises(ValueError, match=message):
            ContentChunker(**arguments)
    ContentChunker(chunk_size=32, boundary_window=31, sentence_ends=[0, 5], separators=[(2**20,)])
    ContentChunker(chunk_size=32, boundary_window=0)
