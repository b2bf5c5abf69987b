"""`Body`: a JSON object of a request, read within limits of size and depth, and the fields that requests share.

Unknown fields are ignored and noted, or refused where the operator says so. `TextRequest` has the fields of all
requests for text, `Sampled` those of chats and completions. The form of an answer is asked for as OpenAI, vLLM and
llama.cpp spell it; `AnswerForm` is what all of them mean.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, from_json
from pydantic_core.core_schema import no_info_after_validator_function

from kvboost_hf.server.http.metrics import PROMPT_CUT, note_changed, note_ignored
from kvboost_hf.server.jobs import Reuse

Item = TypeVar("Item")
# A collection with one error at most, where it would have one for each of millions of items.
Many = Annotated[list[Item], Field(fail_fast=True)]
Named = Annotated[dict[str, Item], Field(fail_fast=True)]
MAX_PARTS = 200_000  # objects, lists, and fields of objects
MAX_DEPTH = 100  # of lists and objects in each other


def only(place: str, kinds: Sequence[str], default: str | None = None) -> BeforeValidator:
    """Leave objects of other types out of a list, and note these, as `Body` notes fields that it does not know.

    Args:
        place: Where the list is in a request.
        kinds: The types that are served.
        default: The type of an object that names none; None to have that checked later.

    Example:
        >>> only("tools", ["function"]).func([{"type": "function"}, {"type": "web_search"}])
        [{'type': 'function'}]
    """

    def kept(given: Any) -> Any:
        if not isinstance(given, list):
            return given
        found = []
        for item in given:
            kind = item.get("type", default) if isinstance(item, dict) else None
            if isinstance(kind, str) and kind not in kinds:
                note_ignored(place, kind)
            else:
                found.append(item)
        if given and not found and default is not None:
            kind = given[0].get("type")
            raise ValueError(f"one must be of a type that is served: {', '.join(kinds)}; got only such as {kind!a}")
        return found

    return BeforeValidator(kept)


class Body(BaseModel):
    """A JSON object, without NaN and infinities.

    Attributes:
        place: Where such objects are in a request, for the names of unknown fields; empty for a whole request.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True)
    place: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _note_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            known = _names_of(cls)
            unknown = [name for name, value in given.items() if name not in known and value is not None]
            if unknown:
                note_ignored(cls.place, *unknown)
        return given


@dataclass(frozen=True)
class Refusal:
    """The type of a field that asks for what the server cannot do, so that ignoring it would give another answer."""

    why: str  # what it asks for, and what to do
    accepted: Any = None  # a value that asks for nothing, besides empty ones
    code: str | None = None  # by which clients know what to do; None for that of any invalid value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def _check(self, given: Any) -> None:
        if given and given != self.accepted:
            raise PydanticCustomError("refused", "{why}", {"why": self.why, "code": self.code})


def absent(*values: Any) -> BeforeValidator:
    """Take some values for a field that was left out, such as -1 for a length without a limit."""
    return BeforeValidator(lambda given: None if given in values and not isinstance(given, bool) else given)


def _number(given: Any) -> Any:
    if isinstance(given, bool):
        raise ValueError(f"must be a number, got {json.dumps(given)}")
    return given


NUMBER = BeforeValidator(_number)
"""For fields with numbers: booleans, which Pydantic takes for 0 and 1, are refused."""


@cache
def _names_of(kind: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


class LargeJsonError(ValueError):
    """JSON has too many parts, or they are nested too deep.

    Args:
        deep: Whether it is the depth.
        got: How many parts there are, otherwise.
    """

    def __init__(self, *, deep: bool = False, got: int = 0) -> None:
        if deep:
            message = f"Lists and objects must be nested {MAX_DEPTH} deep at most, got more. Flatten them."
        else:
            message = f"JSON may have {MAX_PARTS} objects, lists and fields, got {got}. Send several requests."
        super().__init__(message)
        self.deep = deep


def require_few_parts(texts: Sequence[bytes]) -> None:
    """Raise a `LargeJsonError` if texts have too many parts together; they are not parsed for this."""
    if sum(map(_count, texts)) <= MAX_PARTS:
        return
    plain = (text.replace(rb"\\", b"").replace(rb"\"", b"") for text in texts)
    # Up to where it is no JSON, if it is not.
    parts = sum(_count(b"".join(text.split(b'"')[::2])) for text in plain)
    if parts > MAX_PARTS:
        raise LargeJsonError(got=parts)


def read_json(raw: bytes) -> Any:
    """Parse JSON, or raise `LargeJsonError` or `json.JSONDecodeError`.

    A mark of the byte order is skipped, and UTF-16 and UTF-32 are read as Python's `json` reads them.

    Example:
        >>> read_json(b'{"n": 2}')
        {'n': 2}
    """
    raw = _as_utf8(raw)
    require_few_parts([raw])
    try:
        found = from_json(raw)
    except ValueError as error:
        why = str(error)
        if "recursion" in why:
            raise LargeJsonError(deep=True) from error
        if "escape" in why or "unicode" in why:  # such as half of a character
            why += "; texts must be valid Unicode, in UTF-8"
        raise json.JSONDecodeError(why, "", 0) from error
    inner = [found]
    for _ in range(MAX_DEPTH):
        inner = [part for whole in inner for part in _inside(whole) if isinstance(part, dict | list)]
    if inner:
        raise LargeJsonError(deep=True)
    return found


def _as_utf8(raw: bytes) -> bytes:
    encoding = json.detect_encoding(raw)
    if encoding == "utf-8":
        return raw
    try:
        return raw.decode(encoding).encode()
    except UnicodeError as error:
        raise json.JSONDecodeError(f"it looks like {encoding}, and is none: {error}. Send UTF-8", "", 0) from error


def _inside(whole: Any) -> Any:
    if isinstance(whole, dict):
        return whole.values()
    return whole if isinstance(whole, list) else ()


def _count(raw: bytes) -> int:
    return sum(raw.count(sign) for sign in (b"{", b"[", b":"))


MAX_STOPS = 64  # an editor names the marks of a model, and the words that begin a declaration
MAX_BIASES = 10_000
MAX_STOP_TOKENS = 1000
_Token = Annotated[int, Field(ge=0), NUMBER]
_Added = Annotated[float, Field(ge=-100, le=100), NUMBER]
_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63), NUMBER]
Length = Annotated[Annotated[int, Field(ge=1), NUMBER] | None, absent(-1)]
SessionName = Annotated[Annotated[str, Field(max_length=1024)] | None, absent("")]
# 0 means all tokens; without a value, that of the model's generation config counts.
TopK = Annotated[int, Field(ge=0), BeforeValidator(lambda given: 0 if given == -1 else given), NUMBER] | None
FormKind = Literal["json", "regex", "choice", "grammar"]
_ANY_OBJECT = {"type": "object"}
_Schema = Annotated[
    dict[str, Any], BeforeValidator(lambda given: read_json(given.encode()) if isinstance(given, str) else given)
]
_Choice = Annotated[Many[str], Field(min_length=1)]


# Of which `true` allows anything.
JsonSchemaBody = Annotated[dict[str, Any], BeforeValidator(lambda given: {} if given is True else given)]


def _as_biases(given: Any) -> Any:
    """Pairs of a token and its bias as a dict; `false` for a token that must not come, as llama.cpp takes it."""
    if isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        return {str(token): -100 if bias is False else bias for token, bias in given}
    return given


_Bias = Annotated[dict[_Token, _Added], Field(max_length=MAX_BIASES, fail_fast=True), BeforeValidator(_as_biases)]


class StreamOptions(Body):
    """Options of a stream."""

    place: ClassVar = "stream_options"
    include_usage: bool = False


class TextRequest(Body):
    """The fields that all requests for text have."""

    model: str | None = None
    """The model's name, or one of `--model-alias`; the only model where it is left out."""
    temperature: Annotated[float, Field(ge=0, le=2), NUMBER] | None = None
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    """With 0 only the likeliest token is left."""
    stream: bool | None = None
    """Server-sent events."""
    prompt_cache_key: SessionName = None
    """Names the session, and leads a cluster to the replica that has it; it separates no K/V, as `cache_salt` does."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Requests share K/V only with requests of the same salt, as in vLLM."""
    modalities: Annotated[Any, Refusal("answers are text; leave modalities out, or pass ['text']", ["text"])] = None
    audio: Annotated[Any, Refusal("answers are text; leave audio out")] = None
    web_search_options: Annotated[Any, Refusal("the server searches nothing; offer a tool that does")] = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """Pins the K/V of the prompt in host memory, for 10 minutes or 24 hours after each use."""
    priority: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] | None = None
    """Of the waiting requests of one client, those with the smallest number run first."""
    repair: Reuse | None = None
    """How K/V of text that has moved is used, in place of the server's policy: `exact` uses none."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form that an answer must have."""

    field: str  # the field that asks for it
    # `"json"` by a schema, a text that `"regex"` matches, one of some texts (`"choice"`), or `"grammar"`.
    kind: FormKind
    value: Any  # the schema, the regular expression, the texts, or the grammar in GBNF or Lark
    strict: bool = False  # whether what a grammar cannot hold of a schema is refused, in place of left to the model


class TextFormat(Body):
    """Any text."""

    place: ClassVar = "response_format"
    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object, or JSON of a schema."""

    place: ClassVar = "response_format"
    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class JsonSchema(Body):
    """A schema that an answer must keep to."""

    place: ClassVar = "response_format.json_schema"
    name: str = "answer"
    description: str | None = None
    schema_: JsonSchemaBody | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """With true, what a grammar cannot hold of the schema is refused; else it is left to the model, and named."""


class SchemaFormat(Body):
    """JSON of a schema."""

    place: ClassVar = "response_format"
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's form of an answer: one of these."""

    place: ClassVar = "structured_outputs"
    json_: _Schema | None = Field(default=None, alias="json")
    """A schema, also as text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    choice: _Choice | None = None
    grammar: str | None = None
    """In GBNF or Lark."""
    structural_tag: Annotated[Any, Refusal("structural tags are not served; pass json, regex, choice or grammar")] = (
        None
    )


class FormFields(Body):
    """The fields that ask for a form, of which a request may have one."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    """vLLM: a JSON schema, also as text."""
    guided_regex: str | None = None
    """vLLM: see `regex`."""
    guided_choice: _Choice | None = None
    """vLLM: see `choice`."""
    guided_grammar: str | None = None
    """vLLM: see `grammar`."""
    json_schema: dict[str, Any] | None = None
    """llama.cpp: a JSON schema."""
    grammar: str | None = None
    """llama.cpp: a grammar in GBNF, or in Lark; without `%json`."""
    regex: str | None = None
    """A regular expression in the syntax of Rust, which the whole answer matches."""
    choice: _Choice | None = None
    """Texts, of which the answer is one."""

    @model_validator(mode="after")
    def _one_form(self) -> "FormFields":
        if len(self._forms) > 1:
            first, second, *_ = (form.field for form in self._forms)
            raise ValueError(f"{first} and {second} must not be given together; leave out all but one")
        return self

    @property
    def form(self) -> AnswerForm | None:
        """The form that the answer must have; None for any text."""
        return next(iter(self._forms), None)

    @property
    def _forms(self) -> list[AnswerForm]:
        """All that is asked for."""
        inner = self.structured_outputs or StructuredOutputs()
        found = [
            AnswerForm(
                "response_format", "json", _schema_of(self.response_format), strict=_is_strict(self.response_format)
            ),
            AnswerForm("json_schema", "json", self.json_schema),
            AnswerForm("guided_json", "json", self.guided_json),
            AnswerForm("structured_outputs.json", "json", inner.json_),
            AnswerForm("structured_outputs.json_object", "json", _ANY_OBJECT if inner.json_object else None),
        ]
        kinds: list[FormKind] = ["regex", "choice", "grammar"]
        for kind in kinds:
            found += [
                AnswerForm(kind, kind, getattr(self, kind)),
                AnswerForm(f"guided_{kind}", kind, getattr(self, f"guided_{kind}")),
                AnswerForm(f"structured_outputs.{kind}", kind, getattr(inner, kind)),
            ]
        return [form for form in found if form.value is not None]


class Sampled(FormFields, TextRequest):
    """The fields of both kinds of completions."""

    n: Annotated[int, Field(ge=1), NUMBER] | None = None
    """Answers to one prompt; `prompts x n` may be 16."""
    max_tokens: Length = None
    """Tokens of the answer, at most; as many as the context has room for where it is more, left out, or -1."""
    stop: str | Annotated[Many[str], Field(max_length=MAX_STOPS)] | None = None
    """Texts that end the answer and are left out of it; empty ones are ignored."""
    include_stop_str_in_output: bool | None = None
    """Leave what ends the answer in it: a stop text, or the token's text."""
    stop_token_ids: Annotated[Many[_Token], Field(max_length=MAX_STOP_TOKENS)] | None = None
    """Tokens that end the answer, besides those of the model."""
    ignore_eos: bool | None = None
    """The model's tokens for an end do not end the answer; they count as any other."""
    min_tokens: Annotated[int, Field(ge=0), NUMBER] | None = None
    """Nothing ends the answer before it has so many tokens, but the end of what a grammar allows."""
    skip_special_tokens: bool | None = None
    """`false` leaves special tokens in the text. With tools they are read, and the field changes nothing."""
    seed: _Int64 | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = None
    logit_bias: _Bias | None = None
    """By token id, or a list of pairs; `false` in a pair for a token that must not come."""
    stream_options: StreamOptions | None = None
    top_k: TopK = None
    """0 and -1 for all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100), NUMBER] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), NUMBER] | None = None
    """Leave out the beginning of a prompt that has more tokens; -1 for as many as the context has."""

    @property
    def truncates(self) -> bool:
        """Whether the beginning of a prompt that is too long is left out."""
        return self.truncate_prompt_tokens is not None

    def truncated(self, ids: list[int]) -> list[int]:
        """The last tokens of a prompt, as many as are asked for."""
        most = self.truncate_prompt_tokens or 0
        if not 0 < most < len(ids):
            return ids
        note_changed(PROMPT_CUT)
        return ids[-most:]

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(text for text in given if text)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


def _is_strict(form: ResponseFormat | None) -> bool:
    return isinstance(form, SchemaFormat) and form.json_schema.strict is True


def _schema_of(form: ResponseFormat | None) -> Mapping[str, Any] | None:
    match form:
        case ObjectFormat(schema_=schema) | SchemaFormat(json_schema=JsonSchema(schema_=schema)):
            return _ANY_OBJECT if schema is None else schema
        case _:
            return None
