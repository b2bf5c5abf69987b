"""`TextStream`: decodes the tokens of an answer as they come."""

from collections.abc import Sequence
from functools import lru_cache

from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase

from kvboost_hf.server.jobs import ReasoningSpan

# How many tokens are decoded again in front of a new one, so that it gets the space and the form it has behind them.
_CONTEXT_TOKENS = 16

# `clean_up_tokenization` takes spaces out of so many characters at most, as in "is n ' t".
_CLEANED_CHARS = 8


class TextStream:
    """The text of one answer, in pieces that stay as they are whatever comes next.

    Held back are half of a character, what may begin a stop text, and spaces that the tokenizer may still take out.
    The pieces together are `tokenizer.decode(answer, skip_special_tokens=True)`, but with the space that the answer
    has behind the text of its prompt, and up to the stop text that is complete first. Where bytes of a tokenizer with
    byte fallback do not make up a character, the characters before them stay, which `decode()` spoils.

    Each token costs the decoding of some 50 tokens at most, however long the text is, broken bytes apart.

    Args:
        tokenizer: The tokenizer of the model.
        stop: Texts that end the answer; not empty ones.
        prompt_ids: The token ids of the prompt. Special tokens at its end begin a new text.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop: Leave the stop text at the end of the text.
        reasoning: The reasoning at the beginning of the answer, in which stop texts end nothing; None for none.

    Raises:
        ValueError: a stop text is empty.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> _, tokenizer = load_embedded()
        >>> stream = TextStream(tokenizer, stop=("piano",))
        >>> text = [stream.push(token) for token in tokenizer.encode("Anna plays the piano.")]
        >>> "".join(text), stream.stopped
        ('Anna plays the ', True)
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        reasoning: ReasoningSpan | None = None,
    ) -> None:
        if "" in stop:
            raise ValueError(f"`stop` must not have empty texts, got {list(stop)!r}. Leave them out.")
        self.stop: str | None = None  # the stop text that has ended the answer
        self._tokenizer = tokenizer
        self._stops, self._include_stop = tuple(stop), include_stop
        self._skip_special_tokens = skip_special_tokens
        self._cleans_up = _cleans_up(tokenizer)
        self._held = ""  # decoded, but may begin a stop text
        self._reasoning = reasoning if stop else None  # while it may go on
        self._thinking = reasoning is not None and reasoning.opened
        self._thought = ""  # decoded, but may begin a mark of the reasoning
        self._window = self._context(prompt_ids)  # the last tokens
        # What was decoded of them for good, and how many of them that is all of.
        self._told, self._whole = self._whole_characters(self._window)

    @property
    def stopped(self) -> bool:
        """Whether a stop text has ended the answer."""
        return self.stop is not None

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Add a token; returns the text that is certain now and was not before. Empty after a stop text.

        `may_stop` says whether a stop text that is complete with this token ends the text.
        """
        if self.stopped:
            return ""
        self._window.append(token)
        text = self._text()
        sure = len(text.rstrip("\ufffd")) - (_CLEANED_CHARS if self._cleans_up else 0)
        piece = text[len(self._told) : max(sure, len(self._told))]
        self._told += piece
        if self._told == text:
            self._whole = len(self._window)
        if len(self._window) >= 2 * _CONTEXT_TOKENS and not text.endswith("\ufffd"):
            self._shorten(text)
        return self._until_stop(piece, may_stop)

    def finish(self, *, may_stop: bool = True) -> str:
        """The rest of the text: no more tokens come. See `push`."""
        if self.stopped:
            return ""
        piece = self._until_stop(self._text().removeprefix(self._told), may_stop)
        if self._reasoning is not None:
            thought, self._thought, self._reasoning = self._thought, "", None
            piece += thought if self._thinking else self._until_stop(thought, may_stop)
        rest, self._held = self._held, ""
        return piece if self.stopped else piece + rest

    def _text(self) -> str:
        text = self._decode(self._window)
        # A broken byte spoils all bytes that are in a row with it, those that were told as characters, too.
        return text if text.startswith(self._told) else self._told + self._decode(self._window[self._whole :])

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
        assert isinstance(text, str)
        return text

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The end of the prompt's last text, from a whole character on."""
        special = _special_ids(self._tokenizer)
        context: list[int] = []
        for token in reversed(prompt_ids[-_CONTEXT_TOKENS:]):
            if token in special:
                break
            context.insert(0, token)
        if len(context) == _CONTEXT_TOKENS:  # may begin in a character
            starts = (context[n:] for n in range(4))
            return next((ids for ids in starts if self._whole_characters(ids)[0][:1] not in ("", "\ufffd")), context)
        return context

    def _whole_characters(self, ids: list[int]) -> tuple[str, int]:
        """The text of tokens, without half a character at their end, and how many of them it is the text of."""
        for count in range(len(ids), max(len(ids) - 4, -1), -1):  # a character has four bytes at most
            text = self._decode(ids[:count])
            if not text.endswith("\ufffd"):
                return text, count
        return self._decode(ids).rstrip("\ufffd"), len(ids)

    def _shorten(self, text: str) -> None:
        """Forget the first tokens of the window, if `text`, which is all of it, ends with what the others say."""
        last = len(self._window) - _CONTEXT_TOKENS
        for start in range(last, last - _CONTEXT_TOKENS, -1):
            rest = self._decode(self._window[start:])
            if len(rest) > len(text) - len(self._told) and text.endswith(rest):
                del self._window[:start]
                self._told = self._told[len(text) - len(rest) :]
                self._whole = max(0, self._whole - start)
                return

    def _unthought(self, piece: str) -> tuple[str, str]:
        """The part of a piece that is reasoning, and what is behind it; a mark that has begun is held back."""
        marks, self._thought = self._reasoning, self._thought + piece
        assert marks is not None
        if not self._thinking:
            begun = self._thought.lstrip()
            if not begun.startswith(marks.open) and marks.open.startswith(begun):
                return "", ""
            self._thinking = begun.startswith(marks.open)
        end = self._thought.find(marks.close) if self._thinking else 0
        if end < 0:
            longest = min(len(marks.close) - 1, len(self._thought))
            held = next((n for n in range(longest, 0, -1) if self._thought.endswith(marks.close[:n])), 0)
            sure = len(self._thought) - held
            told, self._thought = self._thought[:sure], self._thought[sure:]
            return told, ""
        end += len(marks.close) if self._thinking else 0
        told, rest = self._thought[:end], self._thought[end:]
        self._thought, self._reasoning = "", None
        return told, rest

    def _until_stop(self, piece: str, may_stop: bool) -> str:
        """`piece` behind what was held back, up to what may begin a stop text."""
        told = ""
        if self._reasoning is not None:
            told, piece = self._unthought(piece)
            if self._reasoning is not None:
                return told
        return told + self._stopped(piece, may_stop)

    def _stopped(self, piece: str, may_stop: bool) -> str:
        text, held = self._held + piece, len(self._held)
        # One that was complete while nothing might stop may be in what was held back.
        starts = {stop: text.find(stop, max(0, held - len(stop) + 1)) for stop in self._stops if may_stop}
        found = [(start + len(stop), start, stop) for stop, start in starts.items() if start >= 0]
        if found:
            end, start, self.stop = min(found)
            self._held = ""
            return text[: end if self._include_stop else start]
        longest = max(map(len, self._stops), default=1) - 1
        held = next((n for n in range(min(longest, len(text)), 0, -1) if self._may_begin_stop(text[-n:])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _may_begin_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)


@lru_cache(maxsize=8)
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = {token for token, what in tokenizer.added_tokens_decoder.items() if what.special}
    return frozenset(added.union(tokenizer.all_special_ids))


def _cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `decode()` takes spaces out; it does not for BPE, whatever the setting is."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return bool(tokenizer.clean_up_tokenization_spaces) and not isinstance(getattr(backend, "model", None), BPE)
