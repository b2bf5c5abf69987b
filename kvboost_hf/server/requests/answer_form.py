"""The fields of a request that ask for a form of the answer: OpenAI's, and those of vLLM and llama.cpp."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvboost_hf.server.requests.fields import Body, Many, Refusal
from kvboost_hf.server.requests.json_text import read_json

Kind = Literal["json", "regex", "choice", "grammar"]

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form that an answer must have.

    Args:
        field: The field that asks for it.
        kind: `"json"` by a schema, a text that `"regex"` matches, one of some texts (`"choice"`), or `"grammar"`.
        value: The schema, the regular expression, the texts, or the grammar in GBNF or Lark.
    """

    field: str
    kind: Kind
    value: Any


_Schema = Annotated[
    dict[str, Any], BeforeValidator(lambda given: read_json(given.encode()) if isinstance(given, str) else given)
]
_Choice = Annotated[Many[str], Field(min_length=1)]


class JsonSchema(Body):
    """A schema that an answer must keep to."""

    place: ClassVar = "response_format.json_schema"
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    place: ClassVar = "response_format"
    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object, or JSON of a schema."""

    place: ClassVar = "response_format"
    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


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
            AnswerForm("response_format", "json", _schema_of(self.response_format)),
            AnswerForm("json_schema", "json", self.json_schema),
            AnswerForm("guided_json", "json", self.guided_json),
            AnswerForm("structured_outputs.json", "json", inner.json_),
            AnswerForm("structured_outputs.json_object", "json", _ANY_OBJECT if inner.json_object else None),
        ]
        kinds: list[Kind] = ["regex", "choice", "grammar"]
        for kind in kinds:
            found += [
                AnswerForm(kind, kind, getattr(self, kind)),
                AnswerForm(f"guided_{kind}", kind, getattr(self, f"guided_{kind}")),
                AnswerForm(f"structured_outputs.{kind}", kind, getattr(inner, kind)),
            ]
        return [form for form in found if form.value is not None]


def _schema_of(form: ResponseFormat | None) -> Mapping[str, Any] | None:
    match form:
        case ObjectFormat(schema_=schema) | SchemaFormat(json_schema=JsonSchema(schema_=schema)):
            return _ANY_OBJECT if schema is None else schema
        case _:
            return None
