"""Finds the reasoning of an answer by the marks around it, and lets a grammar begin behind it."""

import re
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvboost_hf.server.chats.tools import Parsed, joined
from kvboost_hf.server.chats.values import overlap, without_half_mark
from kvboost_hf.server.jobs import Constraint


class ReasoningMarks(NamedTuple):
    """The texts around the reasoning of an answer."""

    open: str
    close: str
    sign: str = ""  # a text of chat templates that make the marks of parts
    answer: tuple[str, str] | None = None  # the texts around what comes behind the reasoning; None for none


_KNOWN = (  # the first that a template has: those of one family come before `<think>`, which others write, too
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ReasoningMarks("<|think:start|>", "<|think:end|>"),  # Solar Open 2
    ReasoningMarks("<mm:think>", "</mm:think>"),  # MiniMax M3
    ReasoningMarks("<longcat_think>", "</longcat_think>"),
    ReasoningMarks("◁think▷", "◁/think▷"),  # Kimi VL
    ReasoningMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>", "open_tag('think'"),  # Kimi K3
    ReasoningMarks("<think:opensource>", "</think:opensource>", "<think{}>"),  # Hunyuan 3
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("<thought>", "</thought>"),  # EXAONE Deep
    ReasoningMarks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)
_ANSWERS = (("<response>", "</response>"), ("<answer>", "</answer>"))  # ERNIE, Hunyuan A13B
# What may follow the text that a call begins with: more of a mark, an object, or a name and its arguments.
_MAY_CALL = re.compile(r"\S*(?:>|\Z)|\s*(?:\Z|[\[{<]|[\w.:/-]+\s*(?:\Z|[\[({<]))")


@lru_cache(maxsize=16)
def marks_in(template: str) -> ReasoningMarks | None:
    """The marks that a model writes, by its chat template; None for none that are known."""
    signs = ((marks, (marks.open, marks.close, marks.sign or marks.open)) for marks in _KNOWN)
    found = next((marks for marks, texts in signs if any(text in template for text in texts)), None)
    if found is None or found.open != "<think>":
        return found
    return found._replace(answer=next((each for each in _ANSWERS if all(text in template for text in each)), None))


@lru_cache(maxsize=8)
def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that `skip_special_tokens` leaves out of a text; `all_special_ids` lacks those without a name."""
    added = {token for token, what in tokenizer.added_tokens_decoder.items() if what.special}
    return frozenset(added.union(tokenizer.all_special_ids))


class AnswerReader(Protocol):
    """Reads the text of one answer, in pieces."""

    thinking: bool  # whether the next text is reasoning, as far as is known

    def push(self, text: str) -> Parsed:
        """Add text; returns what is certain now and was not before."""
        ...

    def finish(self, *, cut: bool = False) -> Parsed:
        """Return the rest; `cut` says whether the answer was ended where it would have gone on."""
        ...


class ReasoningReader:
    """Finds the reasoning at the beginning of an answer; without the white space around it.

    Calls that an answer ends in are calls, also where its reasoning was never ended: Qwen 3.5 writes such answers at
    times.

    Args:
        marks: The texts around the reasoning.
        opened: Whether the prompt has begun the reasoning.
        rest: Reads what comes behind the reasoning; None for text alone.
        calls: Texts that calls begin with.

    Attributes:
        thinking: Whether the next text is reasoning.

    Example:
        >>> reader = ReasoningReader(ReasoningMarks("<think>", "</think>"), opened=True)
        >>> [reader.push(text)[::2] for text in ("So ", "it is.", "</thi", "nk>", "Yes.")]
        [('', 'So'), ('', ' it is.'), ('', ''), ('', ''), ('Yes.', '')]
    """

    def __init__(
        self, marks: ReasoningMarks, *, opened: bool, rest: AnswerReader | None = None, calls: Collection[str] = ()
    ) -> None:
        self._marks, self._rest, self._calls = marks, rest, calls
        self._opens = True  # the opening mark may still come; some models repeat that of the prompt
        self.thinking = opened
        self._bare = opened  # nothing but white space since the last mark, which is left out
        self._held = ""

    def push(self, text: str) -> Parsed:
        if not (self._opens or self.thinking):
            return self._said(text)
        self._held += text
        if self._opens:
            begun = self._held.lstrip()
            if self._marks.open.startswith(begun):
                self._open(begun == self._marks.open)
                return Parsed()
            if not self.thinking and self._marks.close.startswith(begun) and begun != self._marks.close:
                return Parsed()
            self._opens = False
            if not self.thinking and begun.startswith(self._marks.close):  # so MiniMax M3 answers without reasoning
                self._bare, self._held = True, ""
                return self._said(begun.removeprefix(self._marks.close))
            if begun.startswith(self._marks.open):
                self.thinking = self._bare = True
                self._held = begun.removeprefix(self._marks.open)
            elif not self.thinking:
                held, self._held = self._held, ""
                return self._said(held)
        return self._thought()

    def finish(self, *, cut: bool = False) -> Parsed:
        held, self._held = without_half_mark(self._held, self._marks[:2]) if cut else self._held, ""
        if not self.thinking:
            last = self._said(held)
            return joined([last, self._rest.finish(cut=cut)]) if self._rest is not None else last
        begun = self._before_calls(held)
        if self._rest is not None and not cut and begun < len(held):
            found = joined([self._rest.push(held[begun:]), self._rest.finish()])
            if found.calls and not found.content.strip():
                return Parsed("", found.calls, self._stripped(held[:begun].rstrip()))
        return Parsed(reasoning=self._stripped(held.rstrip()))

    def _open(self, complete: bool) -> None:
        if complete:
            self._opens, self.thinking, self._bare, self._held = False, True, True, ""

    def _thought(self) -> Parsed:
        reasoning, close, rest = self._held.partition(self._marks.close)
        if close:
            thought = Parsed(reasoning=self._stripped(reasoning.rstrip()))
            self._held, self.thinking, self._bare = "", False, True
            return joined([thought, self._said(rest)])
        sure = min(len(self._held) - overlap(self._held, self._marks.close), self._before_calls(self._held))
        reasoning = self._held[:sure].rstrip()
        self._held = self._held[len(reasoning) :]
        return Parsed(reasoning=self._stripped(reasoning))

    def _before_calls(self, text: str) -> int:
        """How many characters of reasoning come before what may be a call, or the beginning of one."""
        found = len(text)
        for call in self._calls:
            at = text.find(call)
            while at >= 0 and not _MAY_CALL.match(text, at + len(call)):
                at = text.find(call, at + 1)
            found = min(found, at if at >= 0 else len(text) - overlap(text, call))
        return found

    def _said(self, text: str) -> Parsed:
        text = self._stripped(text)
        return self._rest.push(text) if self._rest is not None else Parsed(text)

    def _stripped(self, text: str) -> str:
        """`text` without the white space behind a mark."""
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        return text


class AnswerFrame:
    """Leaves out the texts around an answer, such as `<answer>` and `</answer>`, with the white space beside them.

    Args:
        marks: The texts around the answer. An answer that does not begin with the first one is left as it is.
        rest: Reads what is between them; None for text alone.

    Example:
        >>> frame = AnswerFrame(("<answer>", "</answer>"))
        >>> [frame.push(text).content for text in ("<answer>\\n", "Yes.", "\\n</ans", "wer>\\n")]
        ['', 'Yes.', '', '']
    """

    thinking = False

    def __init__(self, marks: tuple[str, str], rest: AnswerReader | None = None) -> None:
        self._marks, self._rest = marks, rest
        self._begins, self._framed = True, False
        self._held = ""

    def push(self, text: str) -> Parsed:
        self._held += text
        if self._begins:
            begun = self._held.lstrip()
            if not self._framed and begun != self._marks[0] and self._marks[0].startswith(begun):
                return Parsed()
            self._framed = self._framed or begun.startswith(self._marks[0])
            if self._framed:
                begun = self._held = begun.removeprefix(self._marks[0]).lstrip()
            self._begins = not begun
        return self._said(self._sure() if self._framed else len(self._held))

    def finish(self, *, cut: bool = False) -> Parsed:
        held = self._held
        if self._framed and held.rstrip().endswith(self._marks[1]):
            self._held = held.rstrip().removesuffix(self._marks[1]).rstrip()
        elif cut and (self._begins or self._framed):
            kept = without_half_mark(held, self._marks)
            self._held = kept.rstrip() if len(kept) < len(held) else held
        last = self._said(len(self._held))
        return joined([last, self._rest.finish(cut=cut)]) if self._rest is not None else last

    def _sure(self) -> int:
        """How many characters of what is held do not belong to the text behind the answer."""
        text = self._held.rstrip()
        if text.endswith(self._marks[1]):
            text = text.removesuffix(self._marks[1])
        elif text == self._held:
            text = text[: len(text) - overlap(text, self._marks[1])]
        return len(text.rstrip())

    def _said(self, size: int) -> Parsed:
        text, self._held = self._held[:size], self._held[size:]
        return self._rest.push(text) if self._rest is not None and text else Parsed(text)


class AfterReasoning:
    """A constraint that holds behind the reasoning; see `Constraint`. Reasoning is free, but must end."""

    def __init__(self, constraint: Constraint, close: int, ends: Collection[int], vocab_size: int) -> None:
        self._constraint, self._close, self._thinking = constraint, close, True
        self._free = torch.ones(vocab_size, dtype=torch.bool)
        self._free[list(ends)] = False

    def allowed(self) -> Tensor:
        """[vocab_size], bool, on the host: the tokens that may come next."""
        return self._free if self._thinking else self._constraint.allowed()

    def advance(self, token: int) -> None:
        """Follow the answer by one token."""
        if self._thinking:
            self._thinking = token != self._close
        else:
            self._constraint.advance(token)

    @property
    def finished(self) -> bool:
        """Whether the answer must end here."""
        return not self._thinking and self._constraint.finished
