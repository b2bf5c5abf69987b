"""The tokens of a text that is tokenized in parts, of which some are known, are those of the whole text."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvboost_hf.assets import load_embedded
from tests.internals.server import TokenCache
from tests.server.test_attacks_text import TOKENIZERS

MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "<|im_start|>x"]  # the last one is longer than another
SEAMS = ["<unk>", "<s>", "</s>", "<|im_", " ", "  ", "\n", "\n\n", "user\n"]
LETTERS = "abcdefghijklmnopqrstuvwxyz<|>_/.\n"
OWNER, OTHER = (b"a", b""), (b"b", b"")


def _fast(backend: Tokenizer, **flags: bool) -> Any:
    backend.add_special_tokens([AddedToken(mark, special=True, **flags) for mark in MARKS[:2]])
    backend.add_tokens(
        [AddedToken(mark, normalized=False) for mark in MARKS[2:]]
    )  # the last one is longer than another
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def _unigram() -> Any:
    vocab = [("<unk>", 0.0), *((letter, -3.0) for letter in LETTERS + "▁"), ("ab", -2.0), ("▁a", -1.5), ("er", -2.0)]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return _fast(backend)


def _wordpiece() -> Any:
    pieces = ["<unk>", *LETTERS, *(f"##{letter}" for letter in LETTERS), "user", "##er"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return _fast(backend)


def _prefix_space() -> Any:
    backend = Tokenizer.from_str(load_embedded()[1].backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return _fast(backend)


_MORE: dict[str, Callable[[], Any]] = {"unigram": _unigram, "wordpiece": _wordpiece, "prefix_space": _prefix_space}
_ALL = TOKENIZERS | _MORE
_CACHED = sorted(_ALL.keys() - {"stripping", "lowercasing"})  # the last has its marks in normalized text


@cache
def _tokenizer(name: str) -> Any:
    return _ALL[name]()


_TEXTS = st.lists(st.one_of(st.sampled_from([*MARKS, *SEAMS]), st.text()), max_size=12).map("".join)


@pytest.mark.parametrize("name", sorted(_ALL))
@given(texts=st.lists(_TEXTS, max_size=3), ends=st.lists(st.integers(0, 60), max_size=4))
@settings(max_examples=40, deadline=None)
def test_tokens_are_those_of_the_whole_text(name: str, texts: list[str], ends: list[int]) -> None:
    """Of texts that grow by whatever comes next, and are cut at any place."""
    tokenizer = _tokenizer(name)
    known = TokenCache(tokenizer, 2**20)
    grown = ["".join(texts[:n]) for n in range(len(texts) + 1)]
    for text in [*grown, *(grown[-1][:end] for end in ends), grown[-1]]:
        assert known.encode(tokenizer, text, OWNER) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", sorted(_ALL))
def test_for_which_tokenizers_tokens_are_kept(name: str) -> None:
    """Not where special tokens take white space of their neighbours."""
    assert TokenCache(_tokenizer(name), 2**20).works == (name != "stripping")


@pytest.mark.daily
@pytest.mark.parametrize("takes", ["lstrip", "rstrip", "single_word"])
def test_nor_where_other_added_tokens_do(takes: str) -> None:
    tokenizer: Any = load_embedded()[1]
    tokenizer.add_tokens([AddedToken("<mark>", normalized=False, **{takes: True})])
    assert not TokenCache(tokenizer, 2**20).works


class _Counting:
    """A tokenizer that remembers what it was asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.texts = tokenizer, list[str]()

    def encode(self, text: str, **options: Any) -> list[int]:
        self.texts.append(text)
        return list(self._tokenizer.encode(text, **options))


@pytest.mark.daily
@pytest.mark.parametrize("name", _CACHED)
def test_only_what_is_new_is_tokenized(name: str) -> None:
    tokenizer = _tokenizer(name)
    known, asked = TokenCache(tokenizer, 2**20), _Counting(tokenizer)
    turns = [f"<|im_start|>user\nab {'abc ' * turn}<|im_end|>\n" for turn in range(4)]
    for turn in range(1, 5):
        known.encode(asked, "".join(turns[:turn]), OWNER)
    assert asked.texts == [turns[0], *(turn.removesuffix("<|im_end|>\n") for turn in turns[1:])]
    known.encode(asked, "".join(turns), OTHER)  # learns nothing of what the first has asked
    known.encode(asked, "".join(turns), (OWNER[0], b"salt"))
    assert asked.texts[4:] == ["".join(turns)] * 2


def test_what_is_kept_of_a_client_is_bounded() -> None:
    tokenizer = _tokenizer("embedded")
    known, asked = TokenCache(tokenizer, 8_000), _Counting(tokenizer)
    known.encode(tokenizer, "<|im_start|>other", OTHER)
    for n in range(50):
        text = f"<|im_start|>{n}" + "abc " * 100
        known.encode(asked, text, OWNER)
        assert known.encode(asked, text, OWNER) == tokenizer.encode(text, add_special_tokens=False)
    assert len(asked.texts) == 50  # the newest one is there
    known.encode(asked, "<|im_start|>0" + "abc " * 100, OWNER)
    assert len(asked.texts) == 51  # the oldest is not
    known.encode(asked, "<|im_start|>other", OTHER)
    assert len(asked.texts) == 51  # what is kept of another client is not given up for it
    huge = "<|im_start|>" + "abc " * 10_000
    assert known.encode(asked, huge, OWNER) == tokenizer.encode(huge, add_special_tokens=False)
