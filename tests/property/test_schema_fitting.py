"""A fitted schema allows what the given one allows: all of it, and no more than that where nothing is left."""

import re
from itertools import product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.internals.server import fit, rust

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, -1, 1.5, "", "a", "b", "ab", "abc"),
    *([], [1], [1, 1], [1, 2], ["a"], [1, "a"], ["a", 1], [1, 2, 3], [None], [[1]]),
    *({}, {"a": 1}, {"a": "b"}, {"b": 1}, {"a": 1, "b": 2}, {"c": None}, {"a": 1, "b": 2, "c": 3}, {"a": {"a": 1}}),
]
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
COUNTS = st.integers(0, 3)
PATTERNS = st.sampled_from(["^a", "b$", "^[ab]$", "^(?!a)", "c"])
NAMES = st.sampled_from(["a", "b", "c"])
SOME_NAMES = st.lists(NAMES, max_size=2, unique=True)
SCALARS = st.sampled_from([None, True, 0, 1, 2, 1.5, "a", "b", "ab"])
PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True),
    "enum": st.lists(SCALARS, min_size=1, max_size=4, unique_by=repr),
    "const": SCALARS,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), st.integers(-1, 3)),
    "multipleOf": st.sampled_from([1, 2, 0.5]),
    **{f"{end}{of}": COUNTS for end in ("min", "max") for of in ("Length", "Items", "Properties", "Contains")},
    "pattern": PATTERNS,
    "uniqueItems": st.booleans(),
    "required": SOME_NAMES,
    "dependentRequired": st.dictionaries(NAMES, SOME_NAMES, max_size=1),
}


def _of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    nested: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), some),
        **dict.fromkeys(("not", "if", "then", "else", "items", "contains", "propertyNames"), inner),
        **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "unevaluatedItems"), inner),
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
    }
    return _some_of(PLAIN | nested)


def _some_of(keywords: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    chosen = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=4, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: keywords[name] for name in names}))


SCHEMAS = st.recursive(st.booleans() | _some_of(PLAIN) | st.just({"$ref": "#/$defs/d"}), _of, max_leaves=6)


@settings(max_examples=400, derandomize=True)
@given(SCHEMAS, _some_of(PLAIN))
def test_what_is_allowed(schema: Any, referred: Any) -> None:
    whole = {**schema, "$defs": {"d": referred}} if isinstance(schema, dict) else schema
    found = fit(whole, name="the schema", place="", strict=False, is_object=False)
    asked, held = Draft202012Validator(whole), Draft202012Validator(dict(found.schema))
    barred = [value for value in VALUES if asked.is_valid(value) and not held.is_valid(value)]
    assert not barred, found
    if not any(not left.note for left in found.left):
        more = [value for value in VALUES if held.is_valid(value) and not asked.is_valid(value)]
        assert not more, found


PIECES = [
    *"abx19-_. \n",
    *(rf"\{char}" for char in "dwsDWSnt.-/"),
    "[ab]",
    "[^a-]",
    r"[\d-]",
    r"[\w.]",
    "(a|b)",
    "(?:1a)",
]
TEXTS = ["".join(chars) for length in range(4) for chars in product("ab19-_. \n", repeat=length)]
ENDS = st.sampled_from(["", "", "", "?", "*", "+", "{2}"])


@settings(max_examples=300, derandomize=True)
@given(st.lists(st.builds(str.__add__, st.sampled_from(PIECES), ENDS), max_size=3))
def test_patterns_match_the_same_texts(pieces: list[str]) -> None:
    """As far as JavaScript, Python and Rust agree: for ASCII."""
    pattern = f"^{''.join(pieces)}$"
    found, exact = rust(pattern)
    assert exact
    wanted, held = re.compile(pattern, re.ASCII), re.compile(found[0], re.ASCII)
    assert [text for text in TEXTS if wanted.search(text)] == [text for text in TEXTS if held.search(text)]
