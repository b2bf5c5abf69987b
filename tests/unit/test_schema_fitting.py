"""Schemas as people write them: what a grammar holds of them holds, and the rest is named."""

import datetime
import enum
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, EmailStr, Field, Json, SecretStr, TypeAdapter, conint, constr

from kvboost_hf.assets import load_embedded
from tests.internals.server import Grammars, fit, json_schema, rust

pytestmark = pytest.mark.daily

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    model, tokenizer = load_embedded()
    found = Grammars(tokenizer, model.config.vocab_size, processes=1)
    yield found
    found.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_embedded()[1]


class Held(NamedTuple):
    """A schema as it is held."""

    grammars: Grammars
    tokenizer: Any
    grammar: str
    left: list[str]

    def takes(self, value: Any) -> bool:
        """Whether a grammar of it takes the JSON of a value."""
        constraint = self.grammars.constraint(self.grammar)
        for token in self.tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False):
            if not constraint.allowed()[token]:
                return False
            constraint.advance(token)
        return constraint.finished or bool(constraint.allowed()[self.tokenizer.eos_token_id])


@pytest.fixture
def held(grammars: Grammars, tokenizer: Any) -> Any:
    def hold(schema: Any, *, strict: bool = False, is_object: bool = False) -> Held:
        fitted = fit(schema, name="the schema", place="", strict=strict, is_object=is_object)

        def grammar_of(found: Sequence[Mapping[str, Any]]) -> str:
            return json_schema(found[0])

        grammar, found = grammars.fitting(grammar_of, [fitted], b"")
        return Held(grammars, tokenizer, grammar, found[0].names)

    return hold


# Schema, values that it allows, values that a grammar bars, and what is left to the model.
EXACT: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "object", "propertyNames": TEXT, "additionalProperties": NUMBER}, [{"a": 1}], [{"a": "b"}]),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NUMBER},
        [{"a": 1}, {"a": 1, "b": 2}, {}],
        [{"c": 1}, {"a": "x"}],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^x-[a-z]+$"}, "additionalProperties": TEXT},
        [{"x-a": "b"}],
        [{"y": "b"}],
    ),
    ({"type": "object", "properties": {"a": TEXT, "b": {"not": {}}}}, [{"a": "x"}], [{"b": 1}, {"a": "x", "b": "y"}]),
    ({"type": "string", "nullable": True}, ["a", None], [1]),
    ({"type": "string", "enum": ["a"], "nullable": True}, ["a", None], ["b"]),
    ({"type": "string", "const": "a", "nullable": True}, ["a", None], ["b"]),
    ({"type": "string", "anyOf": [{"maxLength": 1}], "nullable": True}, ["a", None], ["ab", 1]),
    ({"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": NUMBER}}, [1, None], ["a"]),
    ({"type": "object", "properties": {"a": NUMBER}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ({"type": "array", "items": [TEXT, NUMBER], "additionalItems": False}, [["a", 1]], [[1, "a"], ["a", 1, 2]]),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, [1], [0, -1]),
    ({"type": "STRING"}, ["a"], [1]),
    ({"type": "any"}, ["a", 1, None], []),
    ({"const": "a", "type": "string"}, ["a"], ["b", 1]),
    ({"enum": ["a", 1, None, True, 1.5, {"b": [2]}]}, ["a", 1, None, True, {"b": [2]}], ["b", 2, False]),
    ({"type": ["string", "null"], "enum": ["a", 3, None]}, ["a", None], [3]),
    ({"type": ["integer", "boolean"]}, [1, True], ["a", None]),
    ({"type": "array", "prefixItems": [TEXT, NUMBER], "items": False, "minItems": 2}, [["a", 1]], [["a"], [1, 1]]),
    (
        {"type": "object", "patternProperties": {r"^\d+$": TEXT}, "additionalProperties": False},
        [{"12": "a"}],
        [{"a": "b"}, {"1": 2}],
    ),
    ({"type": "object", "properties": {"a": True, "b": False}}, [{"a": 1}], [{"b": 1}]),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    ({"oneOf": [{"enum": [1, None]}, {"type": "boolean"}, TEXT]}, [1, None, True, "a"], [2, []]),
    (
        {
            "oneOf": [{"$ref": "#/components/schemas/cat"}, {"$ref": "#/components/schemas/dog"}],
            "discriminator": {"propertyName": "kind"},
            "components": {
                "schemas": {
                    name: {
                        "type": "object",
                        "properties": {"kind": {"type": "string", "enum": [name]}, "age": NUMBER},
                        "required": ["kind"],
                    }
                    for name in ("cat", "dog")
                }
            },
        },
        [{"kind": "cat"}, {"kind": "dog", "age": 3}],
        [{"kind": "cow"}, {"age": 3}],
    ),
    ({"$ref": "#a", "$defs": {"x": {"$anchor": "a", **NUMBER}}}, [1], ["a"]),
    ({"$id": "https://a.example/s", "$ref": "https://a.example/s#/$defs/a", "$defs": {"a": NUMBER}}, [1], ["a"]),
    ({"$ref": "item", "$defs": {"x": {"$id": "item", **NUMBER}}}, [1], ["a"]),
    ({"$ref": "#/definitions/a", "definitions": {"a": NUMBER}}, [1], ["a"]),
    ({"$dynamicRef": "#n", "$defs": {"x": {"$dynamicAnchor": "n", **NUMBER}}}, [1], ["a"]),
    (
        {"$schema": "urn:any", "type": "string", "title": 5, "x-order": 1, "examples": 3, "deprecated": "no"},
        ["a"],
        [1],
    ),
    ({"type": "string", "readOnly": True, "default": 3, "description": None}, ["a"], [1]),
    ({"type": "object", "properties": {"a": {"type": "string", "required": True}}}, [{"a": "b"}], [{"a": 1}]),
    ({"type": "array", "items": TEXT, "uniqueItems": False}, [["a", "a"]], [[1]]),
    ({"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1}, [["a"]], [["a", "a"]]),
    ({"type": ["string", "null"], "not": {"type": "null"}}, ["a"], [None]),
    ({"enum": ["a", "b"], "not": {"const": "b"}}, ["a"], ["b"]),
    ({"not": False, "type": "string"}, ["a"], [1]),
    ({"anyOf": [NUMBER, TEXT], "oneOf": [{"const": 1}, {"const": None}]}, [1], ["a", 2, None]),
    ({"type": "string", "minLength": 2, "maxLength": 2}, ["ab"], ["a", "abc"]),
    ({"type": "integer", "minimum": 3, "maximum": 3}, [3], [2, 4]),
    ({"type": "string", "pattern": r"^\d{4}$"}, ["2024"], ["\u0662\u0660\u0662\u0664", "20"]),
    ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ["-1.5", "0.5", "7"], [".", "+", "", "a"]),
    ({"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{4,}$"}, ["Ab1c"], ["abcd", "A1", "ABCD"]),
    ({"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+\.de$"}, ["a.b@c.de"], [".a@c.de", "a..b@c.de"]),
    ({"type": "string", "pattern": r"^\/[\w.-]+\/$"}, ["/a_b/"], ["a", "/\u00e9/"]),
    # Escaped or in a class, what ends a group, opens a class or parts choices is a character like others.
    ({"type": "string", "pattern": r"^(?!.*[)])[b)]+$"}, ["b"], ["b)", ")b"]),
    ({"type": "string", "pattern": r"^(?!\[)[\[\]|a]+$"}, ["]|a[", "|"], ["[", "[|"]),
    ({"type": "string", "pattern": r"^(?=.*[\\])[a\\]+$"}, ["a\\", "\\"], ["a"]),
    ({"type": "string", "pattern": r"^(?!a)\[a\|b]$"}, ["[a|b]"], ["[a", "b]"]),
    (True, ["a", {"b": 1}], []),
    ({}, ["a", 1], []),
]


@pytest.mark.parametrize(("schema", "allowed", "barred"), EXACT, ids=[json.dumps(each[0])[:60] for each in EXACT])
def test_what_means_the_same_in_other_words_is_held(held: Any, schema: Any, allowed: Any, barred: Any) -> None:
    found = held(schema, strict=True)
    assert found.left == []
    assert [value for value in allowed if not found.takes(value)] == []
    assert [value for value in barred if found.takes(value)] == []


_CAT = {"type": "object", "properties": {"name": TEXT, "lives": NUMBER}, "required": ["name"]}
LEFT: list[tuple[Any, list[Any], list[Any], list[str]]] = [
    (
        {"type": "object", "propertyNames": {"minLength": 2}, "additionalProperties": NUMBER},
        [{"ab": 1}],
        [{"ab": "c"}],
        ["propertyNames"],
    ),
    ({"type": "array", "items": TEXT, "uniqueItems": True}, [["a", "b"]], [[1]], ["uniqueItems"]),
    ({"type": "string", "pattern": r"^(a)\1$"}, ["aa"], ["b"], ["pattern"]),
    ({"type": "string", "pattern": r"^(?<n>a)\k<n>$"}, ["aa"], ["b"], ["pattern"]),
    ({"type": "string", "pattern": "a(?=b)"}, ["ab"], ["b"], ["pattern"]),
    ({"type": "string", "pattern": "^(?!admin$)[a-z]+$"}, ["anna"], ["1"], ["pattern"]),
    ({"type": "string", "pattern": r"\bfoo\b"}, ["a foo"], ["bar"], ["pattern"]),
    ({"type": "string", "pattern": "^(a"}, ["a"], [1], ["pattern"]),
    ({"type": "string", "pattern": 5}, ["a"], [1], ["pattern"]),
    ({"oneOf": [_CAT, {**_CAT, "required": ["lives"]}]}, [{"name": "a"}], [{"name": 1}], ["oneOf"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, [1, 1.5], ["a"], ["oneOf"]),
    ({"oneOf": [{"const": 1}, {"type": "integer"}]}, [1, 2], ["a"], ["oneOf"]),
    ({"oneOf": [{"type": "object", "required": ["name"]}, _CAT]}, [{"name": "a"}], [1], ["oneOf"]),
    (
        {"type": "object", "properties": {"a": TEXT}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        [{"a": "x", "b": 1}, {}],
        [{"a": 1}],
        ["if"],
    ),
    (
        {"type": "object", "properties": {"a": TEXT}, "dependentRequired": {"a": ["b"]}},
        [{"a": "x", "b": 1}],
        [{"a": 1}],
        ["dependentRequired"],
    ),
    ({"type": "object", "dependencies": {"a": ["b"]}}, [{"a": 1, "b": 2}], [1], ["dependencies"]),
    (
        {"allOf": [_CAT, {"type": "object", "properties": {"age": NUMBER}}], "unevaluatedProperties": False},
        [{"name": "a", "age": 3}],
        [{"age": 3}],
        ["unevaluatedProperties"],
    ),
    ({"type": "array", "contains": NUMBER, "minContains": 2}, [[1, 2]], [[1], {}], ["contains"]),
    ({"contains": NUMBER, "minContains": 0, "maxContains": 1}, [[1], []], [], ["contains", "maxContains"]),
    (
        {
            "type": "object",
            "properties": {"ab": TEXT},
            "additionalProperties": False,
            "propertyNames": {"maxLength": 1},
        },
        [{}],
        [1],
        ["propertyNames"],
    ),
    ({"type": "string", "not": {"pattern": "a"}}, ["b"], [1], ["not"]),
    ({"type": "string", "const": 1}, [1], ["a", 2], ["type"]),
    ({"type": "string", "enum": [1, 2]}, [1], ["a"], ["type"]),
    ({"enum": []}, [1], [], ["enum"]),
    ({"type": "file"}, ["a"], [], ["type"]),
    ({"type": 3}, ["a"], [], ["type"]),
    ({"type": "string", "minLength": 5, "maxLength": 2}, ["abc"], [1], ["minLength"]),
    ({"type": "string", "minLength": "5"}, ["abc"], [1], ["minLength"]),
    ({"type": "integer", "minimum": 5, "maximum": 3}, [4], ["a"], ["minimum"]),
    ({"type": "integer", "multipleOf": 0}, [4], ["a"], ["multipleOf"]),
    ({"properties": {"a": 5}}, [{"a": 1}], [], ["properties.a"]),
    ({"allOf": []}, [1], [], ["allOf"]),
    ({"anyOf": {"type": "string"}}, [1], [], ["anyOf"]),
    ({"$ref": "https://a.example/s.json"}, [1], [], ["$ref"]),
    ({"$ref": "#/$defs/none"}, [1], [], ["$ref"]),
    ({"$ref": 5}, [1], [], ["$ref"]),
    ({"$ref": "#"}, [1], [], ["$ref"]),
    (
        {"type": "object", "required": ["z"], "properties": {"a": NUMBER}, "additionalProperties": False},
        [{"a": 1}],
        [{"z": 1}],
        ["required"],
    ),
    (
        {"type": "object", "patternProperties": {"^a": NUMBER, "b$": NUMBER}},
        [{"ab": 1}],
        [1],
        ["patternProperties"],
    ),
    (
        {"type": "object", "properties": {"x": {"$id": "https://a.example/s", "$ref": "#"}}},
        [{"x": 1}],
        [1],
        ["properties.x.$ref"],
    ),
    (
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "string", "pattern": "(("}}},
        [["a"]],
        [[1]],
        ["$defs.a.pattern"],
    ),
    (False, [1], [], [""]),
]


@pytest.mark.parametrize(
    ("schema", "allowed", "barred", "left"), LEFT, ids=[json.dumps(each[0])[:60] for each in LEFT]
)
def test_what_a_grammar_does_not_hold_is_left_and_named(
    held: Any, schema: Any, allowed: Any, barred: Any, left: Any
) -> None:
    found = held(schema)
    assert found.left == left
    assert [value for value in allowed if not found.takes(value)] == []
    assert [value for value in barred if found.takes(value)] == []
    assert held(schema).left == left  # once more, from memory
    with pytest.raises(ValueError, match="cannot be enforced") as told:
        held(schema, strict=True)
    assert "the schema" in str(told.value)
    assert left[0].removeprefix("$defs.").split(".")[-1] in str(told.value)
    for internal in ("Unimplemented", "llguidance", "coerce", "parse error", "\n", "Traceback"):
        assert internal not in str(told.value)


@pytest.mark.parametrize(
    "kind",
    "password binary byte int64 uri-reference regex decimal iri json-pointer color cuid phone x-mine".split(),
)
@pytest.mark.parametrize("base", ["string", "integer"])
def test_unknown_formats_are_notes(held: Any, kind: str, base: str) -> None:
    for strict in (False, True):
        found = held({"type": "object", "properties": {"a": {"type": base, "format": kind}}}, strict=strict)
        assert found.left == ["properties.a.format"]
        assert found.takes({"a": "x" if base == "string" else 1})
        assert not found.takes({"a": None})
    assert held(
        {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"}, strict=True
    ).left == [
        "contentEncoding",
        "contentMediaType",
    ]
    assert held({"type": "string", "format": "date"}, strict=True).left == []


def test_what_comes_behind_many_notes_is_refused_all_the_same(held: Any) -> None:
    noted = {f"p{n}": {"type": "string", "format": "x-mine"} for n in range(200)}
    schema = {"type": "object", "properties": noted | {"bad": {"type": "array", "uniqueItems": True}}}
    assert held({"type": "object", "properties": noted}, strict=True).left
    with pytest.raises(ValueError, match=r"`properties\.bad\.uniqueItems` of the schema cannot be enforced"):
        held(schema, strict=True)
    found = fit(schema, name="It", place="", strict=False, is_object=False)
    assert not found.left[-1].note
    assert sum(left.note for left in found.left) < 200  # a client may send thousands


OBJECTS: list[Any] = [
    {},
    True,
    {"properties": {"a": NUMBER}},
    {"$schema": "http://json-schema.org/draft-07/schema#"},
    {"type": ["object", "null"], "properties": {"a": NUMBER}},
    {"anyOf": [{"type": "object", "properties": {"a": NUMBER}}, {"type": "null"}]},
    {"oneOf": [{"type": "object", "properties": {"a": NUMBER}}, {"type": "null"}]},
    {"allOf": [{"properties": {"a": NUMBER}}]},
    {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"properties": {"a": NUMBER}}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": NUMBER}}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": NUMBER}, "nullable": True}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"properties": {"a": NUMBER}}]}}},
    {"type": "object", "nullable": True, "properties": {"a": NUMBER}},
    {"additionalProperties": NUMBER},
    {"patternProperties": {"^a$": NUMBER}},
    {"required": ["a"]},
    {"description": "Nothing."},
    {"type": "any"},
    {"enum": [{"a": 1}, None]},
]


@pytest.mark.parametrize("schema", OBJECTS, ids=str)
def test_arguments_are_objects(held: Any, schema: Any) -> None:
    found = held(schema, is_object=True)
    assert found.takes({"a": 1})
    for value in (True, None, "a", 1, ["a"]):
        assert not found.takes(value)


@pytest.mark.parametrize("schema", [TEXT, {"type": "array"}, {"$ref": "#"}, {"type": 5}], ids=str)
def test_arguments_of_another_type_are_objects_too(held: Any, schema: Any) -> None:
    found = held(schema, is_object=True)
    assert found.left
    assert found.takes({"a": 1})
    assert not found.takes("a")


class _Colour(enum.Enum):
    RED = "red"
    ONE = 1


class _Cat(BaseModel):
    kind: Literal["cat"]
    lives: conint(ge=1, le=9)  # type: ignore[valid-type]


class _Dog(BaseModel):
    kind: Literal["dog"]
    name: constr(pattern=r"^[A-Z]\w+$")  # type: ignore[valid-type]


class _Tree(BaseModel):
    value: int
    children: list["_Tree"] = []


class _Pair(NamedTuple):
    x: int
    y: str


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    by_name: dict[str, int]


# Types of pydantic, a valid value as JSON, and one that is barred.
TYPES: list[tuple[Any, Any, Any]] = [
    (Decimal, "1.50", [1]),
    (set[str], ["a", "b"], [1]),
    (frozenset[int], [1, 2], ["a"]),
    (_Colour, 1, "blue"),
    (Literal["a", 2, None], 2, "b"),
    (int | None, None, "a"),
    (datetime.datetime, "2024-05-01T10:00:00Z", "today"),
    (datetime.date, "2024-05-01", "May"),
    (datetime.time, "10:00:00Z", "noon"),
    (datetime.timedelta, "P3DT4H", "long"),
    (uuid.UUID, "3fa85f64-5717-4562-b3fc-2c963f66afa6", "3fa85f64"),
    (bytes, "aGk=", 1),
    (SecretStr, "secret", 1),
    (EmailStr, "a@b.de", "a"),
    (Path, "/tmp/a", 1),
    (Json[Any], '{"a": 1}', ...),
    (constr(min_length=2, max_length=3), "ab", "a"),
    (dict[str, int], {"a": 1}, {"a": "b"}),
    (dict[Literal["a", "b"], int], {"a": 1}, {"c": 1}),
    (dict[uuid.UUID, int], {"3fa85f64-5717-4562-b3fc-2c963f66afa6": 1}, {"a": "b"}),
    (tuple[int, str], [1, "a"], ["a", 1]),
    (tuple[int, ...], [1, 2, 3], ["a"]),
    (_Pair, [1, "a"], ["a", 1]),
    (Annotated[_Cat | _Dog, Field(discriminator="kind")], {"kind": "cat", "lives": 7}, {"kind": "cow"}),
    (_Cat | _Dog, {"kind": "dog", "name": "Rex"}, {"kind": "dog", "name": "rex"}),
    (_Tree, {"value": 1, "children": [{"value": 2}]}, {"value": 1, "children": [{"value": "a"}]}),
    (_Closed, {"by_name": {"a": 1}}, {"by_name": {"a": 1}, "more": 1}),
    (Annotated[float, Field(gt=0, multiple_of=0.5)], 1.5, 0),
    (re.Pattern, "a+", 1),
    (Any, {"a": 1}, ...),
    (object, [1], ...),
    (list[Any], [1, "a"], {}),
    (complex, "1+2j", 1),
]


@pytest.mark.parametrize(("kind", "valid", "barred"), TYPES, ids=[str(kind)[:60] for kind, *_ in TYPES])
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_types_of_pydantic(held: Any, kind: Any, valid: Any, barred: Any, mode: Any) -> None:
    inner = TypeAdapter(kind).json_schema(mode=mode)
    defs = inner.pop("$defs", {})
    whole = {"type": "object", "properties": {"value": inner}, "required": ["value"], "$defs": defs}
    jsonschema.validate({"value": valid}, whole)
    found = held(whole, is_object=True)
    assert found.takes({"value": valid})
    assert barred is ... or not found.takes({"value": barred})
    assert not found.takes({})


def test_one_bad_property_of_many_is_found(held: Any) -> None:
    bad = {"type": "string", "pattern": "((("}
    properties = {f"p{n}": TEXT for n in range(100)} | {
        "bad": bad,
        "worse": {"type": "object", "properties": {"x": bad}},
    }
    found = held({"type": "object", "properties": properties, "required": ["bad"]})
    assert sorted(found.left) == ["properties.bad.pattern", "properties.worse.properties.x.pattern"]
    assert found.takes({"bad": "a"})
    assert not found.takes({"p7": "a"})


def test_what_takes_too_long_is_left(held: Any, grammars: Grammars) -> None:
    slow = {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]}
    found = held({"type": "object", "properties": {"slow": slow, "b": NUMBER}}, is_object=True)
    assert found.takes({"slow": 1})
    assert not found.takes(1)
    assert found.left
    grammars.close()  # nothing more is compiled, and this is known
    again = held({"type": "object", "properties": {"slow": slow, "b": NUMBER}}, is_object=True)
    grammars.open()
    assert again.left == found.left


def test_settings_of_the_grammar_are_none_of_a_client(held: Any) -> None:
    found = held({"type": "string", "x-guidance": {"lenient": True, "whitespace_pattern": "a*"}}, strict=True)
    assert found.left == []
    assert not found.takes(1)


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        (r"[\d\-\w]", ["1", "-", "_"], ["\u0661", "\u00e9"]),
        (r"[^\d]", ["a", "\u0661"], ["1"]),
        (r"[[a]", ["[", "a"], ["]", "b"]),
        (r"^[a&&b]$", ["&", "a"], ["-"]),
        (r"^\D\W$", ["a-", "\u0661 "], ["1-", "aa"]),
        (r"^\u0041\x42\cJ\0$", ["AB\n\0"], ["AB"]),
        (r"^\A[a-z]+\Z$", ["ab"], ["1"]),
        (r"^(?<year>\d+)$", ["12"], ["a"]),
        (r"^\k$", ["k"], ["\\k"]),
        (r"^[^]$", ["a", "\n"], [""]),
        # Quotes and backslashes, which texts of JSON escape.
        (r'^a[^"]b$', ["acb", "a\nb", "a\\b"], ['a"b']),
        (r"^[^\\]*$", ['"', "\t"], ["\\", "a\\b"]),
        (r"^[^!-~]$", ["\n", " "], ['"', "\\", "a"]),
        (r"^[\x00-!#-\[]*$", ["\n!", "#"], ['"', "\\"]),
        (r"^[^\p{P}\\]$", ["a"], ['"', "\\", "!"]),
        (r"^\P{P}\PP\p{P}$", ['aa"', "aa\\"], ['"a"', "a\\!"]),
        (r'^[^|"][^||][\D"]$', ['\\"\\'], ['"||', "||a"]),
        # What is left out at the start of a text, before signs of choices and groups that are none.
        (r"^(?!a)[|\])]b$", ["|b", "]b", ")b"], ["ab", "b", "cb"]),
        (r"^(?!a)\|\)[b]$", ["|)b"], ["|)", "a"]),
        (r"^(?!a)(a|b)$", ["b"], ["a"]),
    ],
)
def test_patterns_of_javascript(grammars: Grammars, tokenizer: Any, pattern: str, texts: Any, others: Any) -> None:
    translated = rust(pattern)
    assert translated.exact
    schema = {"type": "string", "allOf": [{"pattern": each} for each in translated.patterns]}
    found = Held(grammars, tokenizer, json_schema(schema), [])
    assert [text for text in texts if not found.takes(text)] == []
    assert [text for text in others if found.takes(text)] == []


def test_patterns_that_no_grammar_holds_are_told() -> None:
    """Whatever stands before and behind what is left out."""
    for pattern in (
        r"(a)\1a",
        r"\bab",
        r"a\Bb",
        r"(?<n>a)\k<n>b",
        "a(?=b)b",
        "(?!a)b|c",
        "(?<=a)b",
        "^(?=a(?=b))a",
        r"^(?!a)[b\]]|c",
    ):
        assert not rust(pattern).exact


@pytest.mark.parametrize(
    "pattern", ["(?=" * 5000, "[" * 5000, "\\" * 5001, "(?!" * 16 + "a", "(?:(?!a)" * 10 + ")" * 10, ""]
)
def test_patterns_that_are_none_end(pattern: str) -> None:
    assert rust(pattern).patterns
