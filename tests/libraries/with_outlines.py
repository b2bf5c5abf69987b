"""Outlines: answers of a given form."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from tests.libraries.prompts import ABOUT_DOCUMENT, DOCUMENT
from tests.libraries.scenario import Answers, Session, scenario


class Building(BaseModel):
    """What the model is to fill in."""

    name: str = Field(max_length=8)
    year: int = Field(ge=0, le=999)


@scenario("outlines", "a regular expression")
def of_a_pattern(session: Session) -> Answers:
    import outlines

    model = _model(session)
    pattern = outlines.types.Regex(r"[A-Z][a-z]{2,8} [a-z]{2,8}\.")
    return [model(prompt, pattern, max_new_tokens=12, do_sample=False) for prompt in ABOUT_DOCUMENT]


@scenario("outlines", "a choice")
def chosen(session: Session) -> Answers:
    model = _model(session)
    return [model(prompt, Literal["Hadrian", "concrete", "609"], max_new_tokens=8) for prompt in ABOUT_DOCUMENT]


@scenario("outlines", "JSON of a pydantic model")
def of_a_schema(session: Session) -> Answers:
    model = _model(session)
    prompts = [f"{DOCUMENT * 2}{order} in JSON: " for order in ("Name and year", "Name and year of rebuilding")]
    return [model(prompt, Building, max_new_tokens=24, do_sample=False) for prompt in prompts]


def _model(session: Session) -> Any:
    import outlines

    return outlines.from_transformers(session.attach(session.model), session.tokenizer)
