"""`Reading`: how the answers to a chat are read: where its reasoning ends, and what in it is a call of a tool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvboost_hf.server.apis.answers import CallReaders
from kvboost_hf.server.apis.constraints import calls_many
from kvboost_hf.server.apis.context import RouteContext
from kvboost_hf.server.chats.reasoning import AfterReasoning, AnswerReader, Marks, ReasoningReader, marks_of
from kvboost_hf.server.chats.tools import ToolCallStream
from kvboost_hf.server.http.errors import refused
from kvboost_hf.server.jobs import Constraint
from kvboost_hf.server.requests.chat import ChatRequest

_TAIL = 32  # tokens at the end of a prompt, of which the opening mark is the last text


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are read.

    Args:
        context: The parts of the server.
        asked: The request.
        prefix: The prompt's text for the tokenizer's own response template; None without such a template.
        marks: The marks of reasoning; None where the model has none, or a response template.
        opened: Whether the prompt has begun the reasoning.
        close: The token that ends the reasoning; None where it is none of its own.
    """

    context: RouteContext
    asked: ChatRequest
    prefix: str | None
    marks: Marks | None
    opened: bool
    close: int | None

    def readers(self, choices: int) -> CallReaders:
        """A reader of each answer.

        Raises:
            ApiError: It is not known how the model writes calls.
        """
        try:
            streams = [reader for _ in range(choices) if (reader := self._reader()) is not None]
        except ValueError as error:
            raise refused("tools", str(error)) from error
        return CallReaders(streams, one_call=not calls_many(self.asked), shows_reasoning=self.asked.shows_reasoning)

    def _reader(self) -> AnswerReader | None:
        tools, calls = [tool.body for tool in self.asked.offered], None
        if tools or self.prefix is not None:
            calls = ToolCallStream(self.context.tokenizer, tools, prefix=self.prefix or "")
        return calls if self.marks is None else ReasoningReader(self.marks, opened=self.opened, rest=calls)

    def constrained(self, constraint: Constraint | None) -> Constraint | None:
        """A constraint that begins behind the reasoning, where the prompt has begun one."""
        if constraint is None or not self.opened or self.close is None:
            return constraint
        return AfterReasoning(constraint, self.close, self.context.ends, self.context.engine.vocab_size)

    @property
    def keeps_special(self) -> bool:
        """Whether the text has special tokens: some models mark calls and reasoning with them."""
        if self.asked.offered or self.prefix is not None:
            return True
        return self.marks is not None and self.close in self.context.tokenizer.all_special_ids


def reading_of(context: RouteContext, asked: ChatRequest, ids: Sequence[int]) -> Reading:
    """How the answers to a request with the prompt `ids` are read."""
    tokenizer = context.tokenizer
    if getattr(tokenizer, "response_template", None) is not None:
        return Reading(context, asked, str(tokenizer.decode(ids)), None, False, None)
    marks = marks_of(tokenizer)
    if marks is None:
        return Reading(context, asked, None, None, False, None)
    close = _token(tokenizer, marks.close)
    opened = _opened(asked, str(tokenizer.decode(ids[-_TAIL:])), marks)
    if close is None and (asked.form is not None or asked.must_call):
        opened = False  # the grammar holds from the beginning: all of the answer is behind the reasoning
    return Reading(context, asked, None, marks, opened, close)


def _opened(asked: ChatRequest, tail: str, marks: Marks) -> bool:
    match asked.rendering.continues:
        case None:
            return tail.rstrip().endswith(marks.open)
        case "content":
            text = asked.messages[-1].text
            return text.rfind(marks.open) > text.rfind(marks.close)
        case _:
            return True


def _token(tokenizer: Any, text: str) -> int | None:
    found = tokenizer.convert_tokens_to_ids(text)
    return None if found is None or found == tokenizer.unk_token_id else int(found)
