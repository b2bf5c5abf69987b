"""Text that comes token by token is the text that decode() gives at once, up to the first stop text."""

import json
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvboost_hf.assets import load_embedded
from tests.internals.server import TextStream

CORPUS = [
    "the cat sat on the mat, and the dog did not. What does Anna play?",
    "Zoë naïve café, isn't it? I've 12 apples; they're 3 euros.",
    "日本語の文章 и русский текст 🙂👩‍👩‍👧",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]


def _wrapped(tokenizer: Tokenizer, **options: bool) -> PreTrainedTokenizerFast:
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **options)


def _byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer)


def _byte_fallback() -> PreTrainedTokenizerFast:
    """Words begin with a low line, as in sentencepiece; characters that are not known are bytes."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learnt = Tokenizer(models.BPE())
    learnt.normalizer = spaces
    learnt.train_from_iterator(CORPUS[:1], trainers.BpeTrainer(vocab_size=80, show_progress=False))
    merges = [tuple(pair) for pair in json.loads(learnt.to_str())["model"]["merges"]]
    known = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(learnt.get_vocab())]
    vocab = {piece: i for i, piece in enumerate(known)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = spaces
    strip = decoders.Strip(content=" ", left=1, right=0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return _wrapped(tokenizer)


def _word_piece(**options: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=not options)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer, **options)


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "embedded": lambda: load_embedded()[1],
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "word_piece": _word_piece,
    "cleaned_up": lambda: _word_piece(clean_up_tokenization_spaces=True),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    return MAKERS[name]()


WORDS = st.sampled_from("the cat sat isn't it , . ! I've 🙂 👩‍👩‍👧 e\u0301 naïve 日本 aa aab n ' t \n".split(" "))
TEXTS = st.one_of(
    st.lists(WORDS, max_size=40).map(" ".join),
    st.lists(WORDS, max_size=20).map("".join),
    st.text(st.sampled_from("ab 🙂é日\u0301\n"), max_size=60),
)
STOPS = st.lists(st.text(st.sampled_from("abcte 🙂日"), min_size=1, max_size=4), max_size=3)
NAMES = st.sampled_from(sorted(MAKERS))


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def cut(text: str, stop: list[str]) -> tuple[str, bool]:
    """`text` as it was when the first stop text was complete, and whether one was; character by character."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stop if text[:end].endswith(s)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


def check(
    tokenizer: PreTrainedTokenizerFast, answer: list[int], expected: str, stop: list[str], prompt: list[int]
) -> None:
    stream = TextStream(tokenizer, stop, prompt)
    expected, stops = cut(expected, stop)
    told = ""
    for token in answer:
        told += stream.push(token)
        assert expected.startswith(told)
    told += stream.finish()
    assert (told, stream.stopped) == (expected, stops)


def whole_characters(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """The text of a prompt that may end in half a character: with byte fallback, that one spoils those before it."""
    texts = [tokenizer.decode(ids[:end]) for end in range(len(ids), max(len(ids) - 4, -1), -1)]
    return next((text for text in texts if not text.endswith("\ufffd")), texts[0])  # type: ignore[return-value]


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("text", ["👩‍👩‍👧", "the cat 👩‍👩‍👧👩‍👩‍👧👩‍👩‍👧"])
def test_a_prompt_may_end_in_any_byte(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    ids = encoded(tokenizer, text)
    whole = tokenizer.decode(ids)
    if tokenizer.unk_token_id in ids:
        assert name in ("word_piece", "cleaned_up", "embedded")
        return
    for at in range(len(ids) + 1):
        before = whole_characters(tokenizer, ids[:at])
        assert whole.startswith(before)
        check(tokenizer, ids[at:], whole[len(before) :], [], ids[:at])  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(NAMES, TEXTS, STOPS)
def test_pieces_are_what_decode_gives(name: str, text: str, stop: list[str]) -> None:
    tokenizer = tokenizer_of(name)
    answer = encoded(tokenizer, text)
    check(tokenizer, answer, tokenizer.decode(answer, skip_special_tokens=True), stop, [])  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["embedded", "byte_level", "word_piece", "cleaned_up"]), st.data(), STOPS)
def test_any_tokens(name: str, data: st.DataObject, stop: list[str]) -> None:
    tokenizer = tokenizer_of(name)
    answer = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=80))
    check(tokenizer, answer, tokenizer.decode(answer, skip_special_tokens=True), stop, [])  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(NAMES, TEXTS, st.data(), STOPS)
def test_an_answer_goes_on_where_its_prompt_ends(name: str, text: str, data: st.DataObject, stop: list[str]) -> None:
    tokenizer = tokenizer_of(name)
    ids = encoded(tokenizer, text)
    at = data.draw(st.integers(0, len(ids)))
    before = whole_characters(tokenizer, ids[:at])
    whole = tokenizer.decode(ids)
    if not whole.startswith(before) or tokenizer.unk_token_id in ids:  # cleaned up across the border; special
        return
    check(tokenizer, ids[at:], whole[len(before) :], stop, ids[:at])  # type: ignore[arg-type]
    alone = tokenizer.decode(ids[at:], skip_special_tokens=True)
    check(tokenizer, ids[at:], alone, stop, [*ids[:at], tokenizer.eos_token_id])  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(NAMES, TEXTS, st.data())
def test_special_tokens_are_left_out_or_not(name: str, text: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(name)
    answer = encoded(tokenizer, text)
    for at in data.draw(st.lists(st.integers(0, len(answer)), max_size=3)):
        answer.insert(at, tokenizer.eos_token_id)
    for skip in (True, False):
        stream = TextStream(tokenizer, skip_special_tokens=skip)
        told = "".join(map(stream.push, answer)) + stream.finish()
        if name != "byte_fallback" or "\ufffd" not in tokenizer.decode(answer):  # see the class
            assert told == tokenizer.decode(answer, skip_special_tokens=skip)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_the_cost_of_a_token_does_not_grow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(name)
    answer = encoded(tokenizer, " ".join(["the cat isn't 🙂 naïve 日本,"] * 100))
    expected = tokenizer.decode(answer, skip_special_tokens=True)
    decode, decoded = tokenizer.decode, []

    def counted(ids: list[int], skip_special_tokens: bool) -> str:
        decoded.append(len(ids))
        return decode(ids, skip_special_tokens=skip_special_tokens)  # type: ignore[return-value]

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, answer)) + stream.finish() == expected
    assert len(answer) >= 900
    assert sum(decoded) < 60 * len(answer)
    assert max(decoded) < 100


def test_decoding_tokens_one_by_one_is_wrong() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = encoded(tokenizer, "a🤖")
    assert "".join(tokenizer.decode([token]) for token in ids) != "a🤖"
    assert len(ids) > 2


@pytest.mark.daily
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("abcd", ["abcd", "c"], "ab"),
        ("abcd", ["bcd", "cd", "d"], "a"),
        ("the cat", ["e c"], "th"),
        ("🙂é🙂", ["é🙂"], "🙂"),
        ("abab", ["abac"], "abab"),
    ],
)
@pytest.mark.parametrize("name", ["embedded", "byte_level", "byte_fallback"])
def test_stop_texts(name: str, text: str, stop: list[str], expected: str) -> None:
    tokenizer = tokenizer_of(name)
    stream = TextStream(tokenizer, stop)
    told = "".join(map(stream.push, encoded(tokenizer, text + " and on" * (text != "abab"))))
    assert told + stream.finish() == expected
    assert stream.stopped == (text != "abab")
    if stream.stopped:
        assert stream.push(encoded(tokenizer, "m")[-1]) == stream.finish() == ""


def test_text_comes_as_early_as_it_is_sure() -> None:
    tokenizer = tokenizer_of("byte_fallback")
    stream = TextStream(tokenizer, ["tz"])
    pieces = [stream.push(token) for token in encoded(tokenizer, "a日b")]
    assert pieces == ["", "a", "", "", "日", "b"]  # the first token is the low line
    assert stream.push(tokenizer.convert_tokens_to_ids("<0xC3>")) == ""  # type: ignore[arg-type]
    assert stream.push(tokenizer.convert_tokens_to_ids("<0xA9>")) == "é"  # type: ignore[arg-type]
    assert stream.push(tokenizer.convert_tokens_to_ids("<0xC3>")) == ""  # type: ignore[arg-type]
    assert stream.finish() == "\ufffd"  # decode() would take é back


def test_empty_stop_texts() -> None:
    with pytest.raises(ValueError, match="`stop` must not have empty texts"):
        TextStream(tokenizer_of("byte_level"), ["a", ""])
