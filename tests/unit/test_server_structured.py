"""Whatever a model would say, what it may say follows the grammar."""

import gc
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import psutil
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvboost_hf.assets import load_embedded
from kvboost_hf.errors import KVBoostError
from tests.internals.server import (
    DrainingError,
    GrammarConstraint,
    Grammars,
    Sampler,
    SamplingOptions,
    json_schema,
    program,
    regex,
    require_ends,
    tool_calls,
)
from tests.tool_calls import parse_tool_calls
from tests.unit.test_server_tools import TEMPLATES, TOOLS

pytestmark = pytest.mark.daily

VOCAB = 1500  # more than the tokenizer has tokens


def strict(**properties: Any) -> dict[str, Any]:
    """An object as OpenAI's strict mode wants it."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


NAME, NUMBER = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 999}
STRICT = [
    strict(name=NAME),
    strict(age=NUMBER, name=NAME),
    strict(colour={"enum": ["red", "green", "blue"]}),
    strict(tags={"type": "array", "items": NAME, "maxItems": 3}),
    strict(person=strict(name=NAME, home=strict(city=NAME, code=NUMBER))),
    strict(value={"anyOf": [NAME, NUMBER, {"type": "null"}]}),
    strict(yes={"type": "boolean"}, never={"type": "null"}),
    strict(at={"$ref": "#/$defs/point"}) | {"$defs": {"point": strict(x=NUMBER, y=NUMBER)}},
    strict(kind={"const": 'a "quoted" text: é'}),
    strict(day={"type": "string", "format": "date"}),
    strict(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    strict(id={"type": "string", "format": "uuid"}),
]
GENERAL = [
    {"type": "object", "properties": {"a": NAME, "b": NUMBER}, "additionalProperties": False},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [NAME, NUMBER], "items": False, "minItems": 2},
    {"allOf": [strict(a=NUMBER), {"required": ["a"]}]},
    {"type": "integer", "multipleOf": 5, "minimum": 10, "maximum": 50},
    {"enum": ["one", 2, None, True]},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": ["boolean", "null"]},
]


_GRAMMARS: dict[Any, Grammars] = {}


def constraint_for(tokenizer: Any, size: int, grammar: str, ends: frozenset[int] = frozenset()) -> GrammarConstraint:
    """A constraint of the grammars for a tokenizer, whose processes end with the module."""
    key = (tokenizer.eos_token_id, len(tokenizer), size, ends)  # the embedded one, with or without added tokens
    if key not in _GRAMMARS:
        _GRAMMARS[key] = Grammars(tokenizer, size, ends=ends, processes=1)
    return _GRAMMARS[key].constraint(grammar)


# Each takes long, much memory, or a deep stack to compile.
TOO_MUCH: list[dict[str, Any]] = [
    {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]},
    {"allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{n}}}$"} for n in range(35)]},
    {"type": "string", "pattern": "^(((a{99}){99}){99}){9}$"},
    {
        "$ref": "#/$defs/l0",
        "$defs": {f"l{n}": {"allOf": [{"$ref": f"#/$defs/l{n + 1}"}]} for n in range(300)}
        | {"l300": {"type": "null"}},
    },
]


@pytest.fixture(scope="module", autouse=True)
def _close() -> Iterator[None]:
    yield
    for grammars in _GRAMMARS.values():
        grammars.close()
    _GRAMMARS.clear()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_embedded()[1]


def sampled(tokenizer: PreTrainedTokenizerFast, kind: str | None, seed: int, n: int = 400) -> tuple[str, bool]:
    """What a model with random logits says in `n` tokens, and whether it came to an end."""
    constraint = constraint_for(tokenizer, VOCAB, kind) if kind else None
    options = SamplingOptions(max_tokens=n, temperature=1.0, seed=seed, constraint=constraint)
    sampler = Sampler(options, [0])
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    for _ in range(n):
        token = sampler.choose(torch.randn(VOCAB, generator=generator) * 3)[0]
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(ids), True  # type: ignore[return-value]
        ids.append(token)
    return tokenizer.decode([token for token in ids if token < len(tokenizer)]), False  # type: ignore[return-value]


@pytest.mark.parametrize("schema", STRICT + GENERAL, ids=str)
def test_random_logits_make_json_of_the_schema(tokenizer: PreTrainedTokenizerFast, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    for seed in range(2):
        text, ended = sampled(tokenizer, json_schema(schema), seed)
        assert ended
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def test_a_random_model_does_too(tokenizer: PreTrainedTokenizerFast) -> None:
    model, _ = load_embedded()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(model.config).eval()
    options = {"max_tokens": 200, "temperature": 1.0, "seed": 0}
    constraint = constraint_for(tokenizer, model.config.vocab_size, json_schema(STRICT[1]))
    ids = tokenizer.encode("Anna plays")
    sampler = Sampler(SamplingOptions(**options, constraint=constraint), ids)  # type: ignore[arg-type]
    answer: list[int] = []
    with torch.inference_mode():
        while not constraint.finished:
            answer.append(sampler.choose(model(torch.tensor([ids + answer])).logits[0, -1])[0])
    jsonschema.validate(json.loads(tokenizer.decode(answer, skip_special_tokens=True)), STRICT[1])  # type: ignore[arg-type]


def test_without_a_constraint_it_is_no_json(tokenizer: PreTrainedTokenizerFast) -> None:
    for seed in range(3):
        text, _ = sampled(tokenizer, None, seed)
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)


@pytest.mark.parametrize("favourite", ["\n", " "])
@pytest.mark.parametrize("calling", [False, True])
def test_a_model_that_prefers_space_comes_to_an_end(favourite: str, calling: bool) -> None:
    """A double of a model: it says the token with most of its favourite among those of space alone, if it may."""
    tokenizer = load_embedded()[1]
    tokenizer.chat_template = TEMPLATES["hermes"]
    schema = strict(name={"enum": ["Anna"]}, tags={"type": "array", "items": {"enum": [1]}, "maxItems": 1})
    tool = {"type": "function", "function": {"name": "note", "parameters": schema}}
    grammar = tool_calls(tokenizer, [tool], parallel=False) if calling else json_schema(schema)
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    order = sorted(range(len(texts)), key=lambda t: (-texts[t].count(favourite) if texts[t].isspace() else 0, t))
    constraint, ids = constraint_for(tokenizer, VOCAB, grammar), list[int]()
    while not constraint.finished:
        allowed = constraint.allowed()
        ids.append(next(token for token in order if allowed[token]))
        constraint.advance(ids[-1])
        assert len(ids) < 400, tokenizer.decode(ids)
    text = str(tokenizer.decode(ids))
    assert re.search(rf'{{\s*{favourite}\s*"name"', text)  # it was let have some
    assert max(len(space) for space in re.findall(r"\s+", text)) <= 21
    assert "\n\n" not in text
    written = parse_tool_calls(text, tokenizer, [tool]).calls[0].arguments if calling else text
    jsonschema.validate(json.loads(written), schema)


def test_json_objects_begin_and_go_on_as_such(tokenizer: PreTrainedTokenizerFast) -> None:
    # Random logits nest ever deeper, so that the end may not come.
    constraint = constraint_for(tokenizer, VOCAB, json_schema({"type": "object"}))
    for token in tokenizer.encode('{"a": [1, {"b": null}]'):
        assert not constraint.finished
        assert constraint.allowed()[token]
        constraint.advance(token)
    constraint.advance(tokenizer.encode("}")[0])
    assert constraint.finished
    assert constraint.allowed().nonzero().flatten().tolist() == [tokenizer.eos_token_id]
    constraint = constraint_for(tokenizer, VOCAB, json_schema({"type": "object"}))
    assert not constraint.allowed()[tokenizer.encode("[")[0]]


@pytest.mark.parametrize("layout", [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}], ids=str)
def test_usual_layouts_are_allowed(tokenizer: PreTrainedTokenizerFast, layout: dict[str, Any]) -> None:
    constraint = constraint_for(tokenizer, VOCAB, json_schema({"type": "object"}))
    text = json.dumps({"a": [1, {"b": {"c": [True, None]}}], "d": "e"}, **layout)
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert constraint.allowed()[token]
        constraint.advance(token)


@pytest.mark.parametrize("pattern", ["yes|no", r"[0-9]{3}-[a-f]{2,4}", r"(ab)*c", "é{2}🙂"])
def test_regular_expressions(tokenizer: PreTrainedTokenizerFast, pattern: str) -> None:
    for seed in range(3):
        text, ended = sampled(tokenizer, regex(pattern), seed)
        assert ended
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_calls_as_the_model_writes_them(name: str) -> None:
    tokenizer = load_embedded()[1]
    tokenizer.chat_template = TEMPLATES[name]
    tokenizer.add_special_tokens({"extra_special_tokens": ["[TOOL_CALLS]"]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    marker = tokenizer.convert_tokens_to_ids({"hermes": "<tool_call>"}.get(name, "[TOOL_CALLS]"))
    for seed in range(3):
        text, ended = sampled(tokenizer, tool_calls(tokenizer, TOOLS, parallel=False), seed)
        assert ended
        assert (marker in tokenizer.encode(text)) == (name != "llama")
        content, calls, _ = parse_tool_calls(text, tokenizer, TOOLS)
        assert (content, len(calls)) == ("", 1)
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        jsonschema.validate(json.loads(calls[0].arguments), parameters[calls[0].name])
    named = sampled(tokenizer, tool_calls(tokenizer, TOOLS[1:], parallel=False), seed=0)[0]
    assert [call.name for call in parse_tool_calls(named, tokenizer, TOOLS).calls] == ["weather"]


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral_named"])
def test_calls_in_parallel(name: str) -> None:
    tokenizer = load_embedded()[1]
    tokenizer.chat_template = TEMPLATES[name]
    texts = [sampled(tokenizer, tool_calls(tokenizer, TOOLS), seed, 2000)[0] for seed in range(8)]
    assert max(len(parse_tool_calls(text, tokenizer, TOOLS).calls) for text in texts) > 1
    assert min(len(parse_tool_calls(text, tokenizer, TOOLS).calls) for text in texts) > 0


def test_equal_schemas_are_compiled_once_for_each_salt(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    true = program.compiled
    monkeypatch.setattr(program, "compiled", lambda tokens, text: compiled.append(text) or true(tokens, text))
    grammars = Grammars(tokenizer, VOCAB)
    constraints = [grammars.constraint(json_schema(strict(once=NAME))) for _ in range(3)]
    assert len(compiled) == 1
    grammars.constraint(json_schema(strict(once=NAME)), b"another")
    assert len(compiled) == 2
    for n in range(8):
        grammars.constraint(regex(str(n)), b"another")
    grammars.constraint(json_schema(strict(once=NAME)))  # one salt does not push out what another has
    assert len(compiled) == 10
    grammars.constraint(json_schema(strict(once=NAME)), b"another")  # but what it has itself
    assert len(compiled) == 11
    grammars.close()
    # They share no state.
    constraints[0].advance(tokenizer.encode("{")[0])
    assert not torch.equal(constraints[0].allowed(), constraints[1].allowed())
    assert torch.equal(constraints[1].allowed(), constraints[2].allowed())


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r'"\u0000\u007f\n"', r'"\x00\x7f\n"'),
        (r'"\u0080\U0010ffff"', '"\x80\U0010ffff"'),
        (r'"\U00110000\u12"', r'"\U00110000\u12"'),
        (r'"\[a\]" [\[a\]]', r'"[a]" [\[a\]]'),
        (". # start .", "[\\x00-\U0010ffff] # start ."),
        ("start starts", "start-of-gbnf starts"),
    ],
)
def test_what_the_converter_is_given(written: str, read: str) -> None:
    assert program._PIECES.sub(program._readable, written) == read


def test_time_is_limited_while_a_grammar_is_compiled() -> None:
    with program._limited_time():
        assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"not": {"type": "string"}}, '"not"'),
        (strict(a={"type": "array", "uniqueItems": True}), '"uniqueItems"'),
        ({"if": {}, "then": {}}, '"if", "then"'),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3, "type": "string"}]}, "oneOf"),
        ({"type": "string", "format": "colour"}, "colour"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ],
    ids=str,
)
def test_schemas_that_cannot_be_enforced(tokenizer: PreTrainedTokenizerFast, schema: Any, names: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be enforced: .*{re.escape(names)}"):
        constraint_for(tokenizer, VOCAB, json_schema(schema))


def test_regular_expressions_that_are_none(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="unclosed group"):
        constraint_for(tokenizer, VOCAB, regex("(a"))


def test_the_mask_has_the_size_of_the_logits(tokenizer: PreTrainedTokenizerFast) -> None:
    for size in (len(tokenizer) - 20, len(tokenizer), VOCAB):
        allowed = constraint_for(tokenizer, size, regex("(?s:.)*")).allowed()
        assert (allowed.shape, allowed.dtype) == ((size,), torch.bool)
        assert not allowed[len(tokenizer) :].any()
        assert allowed.any()


def test_tokens_that_are_not_allowed_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    constraint = constraint_for(tokenizer, VOCAB, regex("yes"))
    with pytest.raises(KVBoostError, match="cannot be followed"):
        constraint.advance(tokenizer.encode("n")[0])


def test_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    constraint = constraint_for(tokenizer, VOCAB, regex("[0-9]*"), ends=frozenset({0, 2}))
    assert constraint.allowed()[[0, 1, 2]].tolist() == [True, False, True]
    constraint.advance(0)
    assert constraint.finished
    endless = load_embedded()[1]
    endless.eos_token = None
    with pytest.raises(ValueError, match="`ends` must name a token"):
        constraint_for(endless, VOCAB, regex("a"))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}, "b": NAME}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        {"$defs": {"a/b c": NAME}, "type": "array", "items": {"$ref": "#/$defs/a~1b%20c"}, "maxItems": 2},
        {
            "$id": "https://a.example/s",
            "$defs": {"a": NAME},
            "type": "array",
            "items": {"$ref": "#/$defs/a"},
            "maxItems": 2,
        },
        {"type": "array", "prefixItems": [NUMBER, {"$ref": "#/prefixItems/0"}], "items": False, "minItems": 2},
    ],
    ids=str,
)
def test_references_that_end(tokenizer: PreTrainedTokenizerFast, schema: dict[str, Any]) -> None:
    text, ended = sampled(tokenizer, json_schema(schema), 3)
    assert ended
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("kind", ["anyOf", "allOf"])
def test_references_that_do_not(kind: str) -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {kind: [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}
    with pytest.raises(ValueError, match="leads back to itself"):
        json_schema(schema)


def test_too_much_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    grammars = Grammars(tokenizer, VOCAB)
    for schema in TOO_MUCH:
        with pytest.raises(ValueError, match="takes more than 2 s of computing"):
            grammars.constraint(json_schema(schema))
    assert grammars.constraint(regex("yes")).allowed().any()  # others go on
    grammars.close()  # nothing more is compiled, and these are known
    for schema in TOO_MUCH:
        with pytest.raises(ValueError, match="takes more than 2 s"):
            grammars.constraint(json_schema(schema))


def test_grammars_that_nobody_closes_leave_no_process(tokenizer: PreTrainedTokenizerFast) -> None:
    before = {*psutil.Process().children()}
    grammars = Grammars(tokenizer, VOCAB, processes=1)
    grammars.constraint(regex("a"))
    assert {*psutil.Process().children()} - before
    del grammars
    gc.collect()
    assert not {*psutil.Process().children()} - before


def test_a_process_that_was_killed_is_replaced(tokenizer: PreTrainedTokenizerFast) -> None:
    before = {*psutil.Process().children()}
    grammars = Grammars(tokenizer, VOCAB, processes=1)
    grammars.constraint(regex("a"))
    (process,) = {*psutil.Process().children()} - before
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:  # it has ended with its last thread
        time.sleep(0.01)
    grammars.constraint(regex("b"))
    grammars.close()
    assert not {*psutil.Process().children()} - before
    assert grammars.constraint(regex("b")).allowed().any()  # what is compiled stays usable
    with pytest.raises(DrainingError, match="compiles no more grammars"):
        grammars.constraint(regex("c"))
    assert not {*psutil.Process().children()} - before
    grammars.open()
    assert grammars.constraint(regex("c")).allowed().any()
    grammars.close()


def test_those_that_wait_do_not_outlast_the_compiler(tokenizer: PreTrainedTokenizerFast) -> None:
    """Some compile, some wait for their turn, and one begins while all of them end."""
    before = {*psutil.Process().children()}
    grammars, told = Grammars(tokenizer, VOCAB), list[str]()

    def ask(n: int) -> None:
        schema = strict(**{f"number {n}": {"allOf": [{"multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]}})
        try:
            grammars.constraint(json_schema(schema))
        except (ValueError, DrainingError) as error:
            told.append(type(error).__name__)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    while not {*psutil.Process().children()} - before:
        time.sleep(0.01)
    grammars.close()
    ask(8)
    start = time.process_time()
    for thread in threads:
        thread.join()
    assert time.process_time() - start < 2
    assert told == ["DrainingError"] * 9
    assert not {*psutil.Process().children()} - before


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "number"}, {}])
def test_numbers_have_an_end(tokenizer: PreTrainedTokenizerFast, schema: dict[str, Any]) -> None:
    constraint, (one,) = constraint_for(tokenizer, VOCAB, json_schema(schema)), tokenizer.encode("1")
    digits = 0
    while constraint.allowed()[one]:
        constraint.advance(one)
        digits += 1
        assert digits <= 40
    assert digits == 40
    assert constraint.allowed()[tokenizer.eos_token_id]


def test_space_in_strings_has_an_end_and_digits_in_them_have_none(tokenizer: PreTrainedTokenizerFast) -> None:
    constraint = constraint_for(tokenizer, VOCAB, json_schema({"type": "string"}))
    said = tokenizer.encode('"' + "1" * 100 + " " * 150 + "\\n" * 50)
    for token in said:
        assert constraint.allowed()[token]
        constraint.advance(token)
    space, escape, quote = (tokenizer.encode(text)[0] for text in (" ", "\\", '"'))
    assert constraint.allowed()[[space, escape, quote]].tolist() == [False, False, True]
    assert len(constraint.allowed()) == VOCAB
    constraint.advance(tokenizer.encode("a")[0])
    assert constraint.allowed()[[space, escape, quote]].tolist() == [True, True, True]


def test_what_must_come_may_be_long(tokenizer: PreTrainedTokenizerFast) -> None:
    """A run that the grammar leaves no choice about is not barred."""
    text = "1" * 60
    constraint = constraint_for(tokenizer, VOCAB, regex(text))
    for token in tokenizer.encode(text):
        assert constraint.allowed()[token]
        constraint.advance(token)
    assert constraint.finished


def test_what_references_refer_to_is_limited_in_all() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(498):
        deep = {"not": deep}  # 499 levels, which count in their place, too, below two others
    defs = {"deep": deep, "flat": {"type": "string"}}
    require_ends({"$ref": "#/$defs/deep", "$defs": defs})
    with pytest.raises(ValueError, match="must be 1000 levels deep in all, got 1001"):
        require_ends({"$ref": "#/$defs/deep", "$defs": {**defs, "other": {"$ref": "#/$defs/flat"}}})


@pytest.mark.parametrize("place", ["text/b", "text/0", "list/x", "list/1", "list/-1", "no/where"])
def test_a_reference_to_nothing_says_nothing_of_others(place: str) -> None:
    """Whoever compiles the schema refuses it; here a loop is looked for."""
    require_ends({"$ref": f"#/{place}", "text": "b", "list": [{"type": "string"}]})
    with pytest.raises(ValueError, match="leads back to itself"):
        require_ends({"$ref": "#/list/0", "list": [{"$ref": "#/list/0"}]})
