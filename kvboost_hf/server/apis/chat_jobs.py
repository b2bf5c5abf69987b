"""`start_chat`: submits a job for each answer that a chat asks for, whatever API it came by.

`constraints_of` makes the constraints that a request asks for: JSON, another form of the answer, or tool calls.
`Reading` tells where the reasoning of an answer ends, and what in it is a call of a tool.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from fastapi import Request

from kvboost_hf.cache.planning.beginnings import Order, search_order
from kvboost_hf.server.apis.answers import CallReaders, RequestJobs
from kvboost_hf.server.apis.context import RouteContext
from kvboost_hf.server.chats.reasoning import (
    AfterReasoning,
    AnswerFrame,
    AnswerReader,
    ReasoningMarks,
    ReasoningReader,
    marks_in,
    special_ids,
)
from kvboost_hf.server.chats.tool_formats import known_format
from kvboost_hf.server.chats.tools import REASONING_FIELDS, ToolCallStream
from kvboost_hf.server.grammars.fitting import Fitted, fit
from kvboost_hf.server.grammars.structured import choice, json_schema, regex, tool_calls, written
from kvboost_hf.server.http.errors import refused
from kvboost_hf.server.http.metrics import note_changed, note_left
from kvboost_hf.server.jobs import Constraint, Keep, ReasoningSpan
from kvboost_hf.server.protocol import TooLongError
from kvboost_hf.server.requests.chat import ChatRequest, ToolChoice
from kvboost_hf.server.requests.fields import AnswerForm, Sampled
from kvboost_hf.server.requests.messages import Message

_TAIL = 32  # tokens at the end of a prompt, of which the opening mark is the last text


async def start_chat(
    context: RouteContext,
    body: ChatRequest,
    request: Request,
    *,
    ids: list[int] | None = None,
    new: int | None = None,
    keep: Sequence[Keep] = (),
    tells_known: bool = False,
) -> tuple[RequestJobs, CallReaders]:
    """Submit a job for each answer that a request asks for; returns them, and readers of calls in their texts.

    `ids` are the tokens of the prompt in place of the messages, `new` those of an answer in place of what the body
    asks for, and `keep` are beginnings of the prompt to pin besides. `tells_known` is for `RequestJobs.known`.
    """
    context.require_model(body.model)
    choices = context.require_choices(body.n or 1)
    asked = new if new is not None else body.max_completion_tokens or body.max_tokens
    salt = context.salt(request, body.cache_salt)
    what: Literal["messages", "prompt"] = "messages" if ids is None else "prompt"
    if ids is None:
        body = await _in_best_order(context, body, request)
        ids = await context.encode_chat(body, request, new=context.wanted(asked))
    ids = context.fitted(ids, asked, what=what, truncates=body.truncates)
    reading = reading_of(context, body, ids)
    readers = reading.readers(choices)
    length = context.length(ids, asked, reported=context.reportable(choices, body.reported))
    context.require_few_logprobs(choices * length.tokens, body.reported)
    predicted: Sequence[int] = ()
    if body.prediction is not None and body.prediction.text:
        predicted = await context.encode(body.prediction.text, request)
    jobs = []
    constraints = await constraints_of(context, body, request, salt, choices)
    for number, constraint in enumerate(map(reading.constrained, constraints)):
        options = context.options(body, length=length, logprobs=body.reported, choice=number, constraint=constraint)
        job = context.job(
            ids,
            options,
            salt=salt,
            asked=body,
            skip_special_tokens=not reading.keeps_special,
            limited_by=length.limited_by,
        )
        more = replace(job, prediction=predicted, keep=tuple(keep), reasoning=reading.span(job.stop))
        jobs.append(replace(more, tells_known=tells_known))
    return context.start(jobs, request, body), readers


async def count_tokens(context: RouteContext, body: ChatRequest, request: Request) -> int:
    """The tokens of a prompt, also of one that is too long: clients ask whether it is."""
    try:
        return len(await context.encode_chat(body, request))
    except TooLongError as error:
        too_long = error
    assert too_long.tokens is not None  # the encoder counts them, or estimates
    return too_long.tokens


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are read."""

    context: RouteContext  # the parts of the server
    asked: ChatRequest  # the request
    # The prompt's text for the tokenizer's own response template, and empty for a format that marks answers without
    # calls, too; None for all others.
    prefix: str | None
    marks: ReasoningMarks | None  # the marks of reasoning; None where the model has none, or a response template
    opened: bool  # whether the prompt has begun the reasoning
    close: int | None  # the token that ends the reasoning; None where it is none of its own

    def readers(self, choices: int) -> CallReaders:
        """A reader of each answer."""
        try:
            streams = [reader for _ in range(choices) if (reader := self._reader()) is not None]
        except ValueError as error:
            raise refused("tools", str(error)) from error
        return CallReaders(streams, one_call=not calls_many(self.asked), shows_reasoning=self.asked.shows_reasoning)

    def _reader(self) -> AnswerReader | None:
        tools, calls = [tool.body for tool in self.asked.offered], None
        if tools or self.prefix is not None:
            calls = ToolCallStream(
                self.context.tokenizer,
                tools,
                prefix=self.prefix or "",
                streams=bool(self.asked.stream),
                ids=(call.id for message in self.asked.messages for call in message.calls),
            )
        if self.marks is None:
            return calls
        opens = calls.opens if calls is not None else ()
        rest = calls if self.marks.answer is None else AnswerFrame(self.marks.answer, calls)
        return ReasoningReader(self.marks, opened=self.opened, rest=rest, calls=opens)

    def constrained(self, constraint: Constraint | None) -> Constraint | None:
        """A constraint that begins behind the reasoning, where the prompt has begun one."""
        if constraint is None or not self.opened or self.close is None:
            return constraint
        return AfterReasoning(constraint, self.close, self.context.ends, self.context.engine.vocab_size)

    def span(self, stops: Sequence[str]) -> ReasoningSpan | None:
        """The reasoning, which stop texts do not end, but for those that have its marks in them."""
        marks = self.marks or _marks_of_channels(self.context.tokenizer)
        if marks is None or any(marks.open in stop or marks.close in stop for stop in stops):
            return None
        opened = self.opened if self.marks is not None else (self.prefix or "").rstrip().endswith(marks.open)
        return ReasoningSpan(marks.open, marks.close, opened)

    @property
    def keeps_special(self) -> bool:
        """Whether the text has special tokens: some models mark calls and reasoning with them."""
        if self.asked.offered or self.prefix is not None:
            return True
        return self.marks is not None and self.close in special_ids(self.context.tokenizer)


def reading_of(context: RouteContext, asked: ChatRequest, ids: Sequence[int]) -> Reading:
    """How the answers to a request with the prompt `ids` are read."""
    tokenizer = context.tokenizer
    if getattr(tokenizer, "response_template", None) is not None:
        return Reading(context, asked, str(tokenizer.decode(ids)), None, False, None)
    template = str(tokenizer.chat_template or "")
    known, marks = known_format(template), marks_in(template)
    prefix = "" if known is not None and known.always else None
    if marks is None:
        return Reading(context, asked, prefix, None, False, None)
    close = _token(tokenizer, marks.close)
    opened = _opened(asked, str(tokenizer.decode(ids[-_TAIL:])), marks)
    if close is None and (asked.form is not None or asked.must_call):
        opened = False  # the grammar holds from the beginning: all of the answer is behind the reasoning
    return Reading(context, asked, prefix, marks, opened, close)


def _marks_of_channels(tokenizer: Any) -> ReasoningMarks | None:
    """The marks of reasoning that a response template or a format of calls has; None for none, and for patterns."""
    own = getattr(tokenizer, "response_template", None)
    known = known_format(str(tokenizer.chat_template or ""))
    fields = own["fields"] if own is not None else known.fields if known is not None else {}
    for name in REASONING_FIELDS:
        field = fields.get(name, {})
        opens, closes = field.get("open"), field.get("close")
        opens = opens[0] if isinstance(opens, list) else opens
        if opens and closes:
            return ReasoningMarks(opens, closes if isinstance(closes, str) else closes[0])
    return None


def _opened(asked: ChatRequest, tail: str, marks: ReasoningMarks) -> bool:
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


async def constraints_of(
    context: RouteContext, body: Sampled, request: Request, salt: bytes, answers: int
) -> Sequence[Constraint | None]:
    """Make a constraint for each answer to a request; None for answers that may be any text."""
    must_call = isinstance(body, ChatRequest) and body.must_call
    if body.form is None and not must_call:
        return [None] * answers
    return await context.compile(request, partial(_compiled, context, body, salt, answers, must_call))


def calls_many(body: ChatRequest) -> bool:
    """Whether an answer may have several calls. It may not where the request names one, as in OpenAI's API."""
    one = isinstance(body.tool_choice, ToolChoice) or bool(body.functions)
    return body.parallel_tool_calls is not False and not one


def _compiled(
    context: RouteContext, body: Sampled, salt: bytes, answers: int, must_call: bool
) -> Sequence[Constraint]:
    field = "tools" if body.form is None or must_call else body.form.field
    is_json = True
    schemas: Sequence[Fitted] = ()
    try:
        if isinstance(body, ChatRequest) and body.offered:
            grammar, schemas = _grammar_of_calls(context, body, salt)
        elif body.form is not None and body.form.kind == "json":
            fitted = _fitted_answer(body.form)
            grammar, schemas = context.grammars.fitting(lambda found: json_schema(found[0]), [fitted], salt)
        else:
            assert body.form is not None
            grammar, is_json = _grammar(body.form), False
        constraints = [context.grammars.constraint(grammar, salt, is_json=is_json) for _ in range(answers)]
    except ValueError as error:
        raise refused(field, str(error)) from error
    left = [path for fitted in schemas for path in fitted.names]
    if left and context.settings.strict_requests:
        raise refused(field, f"{left[0]} cannot be enforced, and would be left to the model. Leave it out.")
    note_left(left)
    return constraints


def _grammar(form: AnswerForm) -> str:
    """The grammar of a form other than JSON."""
    match form.kind:
        case "regex":
            return regex(form.value)
        case "choice":
            return choice(form.value)
        case _:
            return written(form.value)


def _fitted_answer(form: AnswerForm) -> Fitted:
    name = f"the schema of {form.field}"
    return fit(form.value, name=name, place=form.field, strict=form.strict, is_object=False)


def _grammar_of_calls(context: RouteContext, body: ChatRequest, salt: bytes) -> tuple[str, Sequence[Fitted]]:
    named = body.tool_choice.function.name if isinstance(body.tool_choice, ToolChoice) else None
    functions = [tool.function for tool in body.offered if named in (None, tool.function.name)]
    form = None if body.must_call else body.form
    if form is not None and form.kind != "json":
        raise ValueError("Answers beside tools can be JSON by a schema only. Pass tool_choice 'none' or 'required'.")
    schemas = [
        fit(
            function.parameters or {},
            name=f"the parameters of the tool {function.name!r}",
            place=f"tools.{function.name}.parameters",
            strict=function.strict is True,
            is_object=True,
        )
        for function in functions
    ]
    if form is not None:
        schemas.append(_fitted_answer(form))

    def grammar_of(found: Sequence[Mapping[str, Any]]) -> str:
        tools = [
            {"type": "function", "function": {"name": function.name, "parameters": schema}}
            for function, schema in zip(functions, found, strict=False)
        ]
        answer = found[-1] if form is not None else None
        return tool_calls(context.tokenizer, tools, parallel=calls_many(body), answer=answer)

    return context.grammars.fitting(grammar_of, schemas, salt)


async def _in_best_order(context: RouteContext, body: ChatRequest, request: Request) -> ChatRequest:
    """The request with parts of messages that have `any_order` where more of the prompt is stored then."""
    for at, message in enumerate(body.messages):
        if (count := len(message.movable)) > 1:
            order = await _order_of(context, body, request, at, count)
            if order != tuple(range(count)):
                note_changed("parts-reordered")
                body = _with(body, at, message.with_movable(order))
    return body


async def _order_of(context: RouteContext, body: ChatRequest, request: Request, at: int, count: int) -> Order:
    search, salt = search_order(count), context.salt(request, body.cache_salt)
    asked = next(search)
    while True:
        message = body.messages[at]
        prompts = [await context.encode_chat(_with(body, at, message.with_movable(some)), request) for some in asked]
        found = await context.read(request, partial(context.engine.known_tokens, prompts, salt))
        try:
            asked = search.send(found)
        except StopIteration as end:
            order: Order = end.value[0]
            return order


def _with(body: ChatRequest, at: int, message: Message) -> ChatRequest:
    messages = [*body.messages[:at], message, *body.messages[at + 1 :]]
    return body.with_messages(messages)
