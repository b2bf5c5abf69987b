"""Forms of answers: the fields of OpenAI, vLLM and llama.cpp, in chats and in completions, and what they refuse."""

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.internals.server import closed
from tests.server.conftest import Listening
from tests.server.fake_engine import FakeEngine
from tests.server.test_tools import _follow

pytestmark = pytest.mark.daily

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Anna", "Noah"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
}
GBNF = """# llama.cpp's
root ::= "It is " (colour | number) "."
colour ::= "red" | "green"
number ::= [0-9]{1,3}
"""
LARK = 'start: "It is " (COLOUR | NUMBER) "."\nCOLOUR: "red" | "green"\nNUMBER: /[0-9]{1,3}/'
OF_GRAMMAR = r"It is (red|green|[0-9]{1,3})\."
KEY = {"Authorization": "Bearer key"}
ASKS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
    ({"guided_regex": "^(yes|no)$"}, "yes|no"),
    ({"structured_outputs": {"regex": "[0-9]{45}"}}, "[0-9]{45}"),
    ({"choice": ["left", 'r"ight', "é🙂\n"]}, 'left|r"ight|é🙂\n'),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"structured_outputs": {"choice": ["only"]}}, "only"),
    ({"grammar": GBNF}, OF_GRAMMAR),
    ({"guided_grammar": LARK}, OF_GRAMMAR),
    ({"structured_outputs": {"grammar": GBNF}}, OF_GRAMMAR),
]
SCHEMAS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"json_schema": SCHEMA},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
]
ROUTES = ("chat/completions", "completions")


def _ask(at: Listening, route: str, change: dict[str, Any]) -> Any:
    asked = {"messages": [{"role": "user", "content": "Who?"}]} if route.startswith("chat") else {"prompt": "Who?"}
    return at.http.post(f"/v1/{route}", json={"max_tokens": 60, "seed": 3} | asked | change, headers=KEY)


def _text(response: Any) -> str:
    assert response.status_code == 200, response.text
    assert "x-kvboost-ignored" not in response.headers
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize(("change", "pattern"), ASKS, ids=lambda value: "-".join(value) if value else "")
def test_texts(reading: Listening, change: dict[str, Any], pattern: str) -> None:
    for route in ROUTES:
        assert re.fullmatch(pattern, _text(_ask(reading, route, change)))


@pytest.mark.parametrize("change", SCHEMAS, ids=lambda change: "-".join(change))
def test_json(reading: Listening, change: dict[str, Any]) -> None:
    for route in ROUTES:
        jsonschema.validate(json.loads(_text(_ask(reading, route, change | {"temperature": 0}))), SCHEMA)


def test_each_answer_and_prompt_has_its_own(reading: Listening) -> None:
    asked = {"prompt": ["Who?", "Where?"], "n": 2, "choice": ["left", "right"], "max_tokens": 60}
    response = reading.http.post("/v1/completions", json=asked, headers=KEY)
    assert response.status_code == 200, response.text
    assert {choice["text"] for choice in response.json()["choices"]} <= {"left", "right"}


def test_least_tokens_do_not_break_a_grammar(reading: Listening) -> None:
    """Its end comes where nothing else may, and ends the answer whatever else does."""
    for change in ({"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 50, "ignore_eos": True}):
        assert re.fullmatch("[a-f]{3}", _text(_ask(reading, "completions", {"regex": "[a-f]{3}"} | change)))
    for least in (0, 20):
        asked = {"regex": "(a|b)*", "min_tokens": least, "logit_bias": {"2": 100}, "temperature": 0}
        response = _ask(reading, "completions", asked)
        assert re.fullmatch("(a|b)*", _text(response))
        assert response.json()["usage"]["completion_tokens"] == least + 1


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"),
    [
        (r'root ::= "\u0041\u00e9\u0022" [\u0041-\u0043\U0001F642\u005d]', 'Aé"🙂', 'Aé"D'),
        (r'root ::= "a\[b\]" "\\[\\u0041"', r"a[b]\[\u0041", r"a[b]\[A"),
        ('root ::= . "x" .*', "\nx\n.", "\ny"),
        ('root ::= start [.] # start .\nstart ::= "start."', "start..", "a."),
        ("root ::= [&&a] [a-f&&b] [^&&a]", "&cb", "&ca"),
        ("root ::= [~~a] [+--] [*--a]", "~,a", "~.a"),
        (r"root ::= [\]&&\[-^]+ [a-]", "&^[-", "a-"),
    ],
)
def test_grammars_that_llama_cpp_takes(
    at: Listening, engine: FakeEngine, tokenizer: Any, grammar: str, taken: str, refused: str
) -> None:
    for text in (taken, refused):
        assert _ask(at, "completions", {"grammar": grammar}).status_code == 200
        assert _follow(engine.job.options.constraint, tokenizer, text) == (text == taken)


ROGUE = "root ::= " + "(" * 5000 + '"a"' + ")" * 5000
HUGE = 'root ::= "a"{1,99999}{1,99999}{1,9999}'
CALLS = {"tools": [{"type": "function", "function": {"name": "look"}}]}
SAID = "must not be given together"


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"regex": "(a"}, "regex", "unclosed group"),
        pytest.param(
            {"guided_regex": "((a{99}){99}){999}"}, "guided_regex", "takes more than 2 s", marks=pytest.mark.slow
        ),
        ({"choice": []}, "choice", "at least 1"),
        ({"guided_grammar": "nothing"}, "guided_grammar", "cannot be enforced"),
        ({"grammar": 'root ::= "a" other'}, "grammar", "Rule 'other' not found"),
        ({"grammar": 'root ::= "a'}, "grammar", "Unexpected end"),
        ({"grammar": 'root ::= "a\\'}, "grammar", "cannot be enforced"),
        ({"grammar": ROGUE}, "grammar", "Leave that out"),
        ({"grammar": HUGE}, "grammar", "enforce"),
        ({"grammar": "root ::= root"}, "grammar", ""),
        ({"grammar": 'start: %json {"$ref": "http://a.example/"}'}, "grammar", "as `json_schema`"),
        ({"grammar": '{"grammars": []}'}, "grammar", "as `json_schema`"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", ""),
        ({"guided_json": "{"}, "guided_json", ""),
        ({"guided_json": "[1]"}, "guided_json", ""),
        ({"guided_json": "[" * 200 + "]" * 200}, "guided_json", "nested 100 deep"),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs.structural_tag", "not served"),
        ({"regex": "a", "choice": ["a"]}, None, SAID),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, None, SAID),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, None, SAID),
    ],
    ids=lambda value: re.sub(r"[^a-z_]+", "-", str(value))[:40],
)
def test_refusals(at: Listening, change: dict[str, Any], param: str | None, told: str) -> None:
    for route in ROUTES:  # the second time it is known
        response = _ask(at, route, change)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert told in error["message"]


def test_text_formats_are_none(at: Listening, engine: FakeEngine) -> None:
    for change in (
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None},
        {"structured_outputs": {"json_object": False}},
    ):
        assert _ask(at, "completions", change).status_code == 200
        assert engine.job.options.constraint is None


def test_forms_beside_tools(at: Listening) -> None:
    response = _ask(at, "chat/completions", CALLS | {"regex": "a"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "regex")
    assert _ask(at, "chat/completions", CALLS | {"regex": "a", "tool_choice": "none"}).status_code == 200


@pytest.mark.daily
@pytest.mark.parametrize(
    ("schema", "stays"),
    [
        (SCHEMA, False),
        ({"properties": {}}, False),
        ({"type": "array", "items": SCHEMA}, False),
        ({"$defs": {"a": SCHEMA}, "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, False),
        ({"type": "object"}, True),
        (SCHEMA | {"additionalProperties": True}, True),
        (SCHEMA | {"patternProperties": {"^x": {}}}, True),
        (SCHEMA | {"required": ["name", "other"]}, True),
        ({"allOf": [SCHEMA, {"properties": {"b": {}}}]}, True),
        ({"$defs": {"a": SCHEMA}, "$ref": "#/$defs/a", "properties": {"b": {}}}, True),
        ({"enum": [{"properties": {"a": 1}}]}, True),
        ({"enum": [{"allOf": [SCHEMA]}], "properties": {}}, False),
        ({"$defs": 5, "items": {"allOf": [SCHEMA]}, "properties": {}}, True),
        ({"anyOf": 5}, True),
        ({"allOf": 5, "properties": {}}, True),
        ({"allOf": [True], "properties": {}}, True),
        ({"properties": {"a": {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}}}, False),  # of one text
        ({"type": "object", "additionalProperties": {"type": "integer"}}, True),
    ],
    ids=str,
)
def test_objects_without_a_word_on_others_have_no_others(schema: dict[str, Any], stays: bool) -> None:
    assert (closed(schema) == schema) is stays
    assert json.dumps(closed(schema)).count("additionalProperties") == json.dumps(schema).count(
        "additionalProperties"
    ) + (not stays)


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {"properties": {"properties": {"type": "string"}, "items": {"properties": {"a": {}}}}}
    assert closed(schema) == {
        "properties": {
            "properties": {"type": "string"},
            "items": {"properties": {"a": {}}, "additionalProperties": False},
        },
        "additionalProperties": False,
    }


@pytest.mark.parametrize("favourite", ["\n", " "])
@pytest.mark.parametrize("whole", [True, False], ids=["schema", "object"])
def test_a_model_that_prefers_space_comes_to_an_end(
    reading: Listening, tokenizer: Any, favourite: str, whole: bool
) -> None:
    """As SmolLM2 and its like prefer line ends; the bias makes the embedded model like them."""
    texts = {token: tokenizer.decode([token]) for token in range(3, len(tokenizer))}
    bias = {str(token): 30 if favourite in text else 10 for token, text in texts.items() if text.isspace()}
    asked = {"logit_bias": bias, "temperature": 0, "max_tokens": 200 if whole else 20}
    response = _ask(reading, "chat/completions", asked | (SCHEMAS[0] if whole else {"json_schema": {}}))
    text = _text(response) if whole else response.json()["choices"][0]["message"]["content"]
    assert not text[0].isspace()
    assert "\n\n" not in text
    if whole:
        assert max(map(len, re.findall(r"\s+", text))) <= 21
        jsonschema.validate(json.loads(text), SCHEMA)
