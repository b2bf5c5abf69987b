"""Each sentence that refuses a body is said of one that just deserves it, and not of one that just does not."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import kvboost_hf.server
from tests.server.conftest import Listening
from tests.server.fake_engine import FakeEngine

SERVER = Path(kvboost_hf.server.__file__).parent
ASK: dict[str, Any] = {"role": "user", "content": "Who?"}
SAID = {"role": "assistant", "content": "Anna."}
CALLED = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": "{}"}}]}
LOOK: dict[str, Any] = {"name": "look"}
TOOL = {"type": "function", "function": LOOK}
CHAT, TEXT, OLLAMA = "/v1/chat/completions", "/v1/completions", "/api/generate"
ANSWERS, CLAUDE, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
WARM, SESSION = "/v1/warm", "/v1/kv/sessions/none"
WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [ASK]},
    TEXT: {"prompt": "a"},
    CLAUDE: {"messages": [ASK], "max_tokens": 9},
    COUNT: {"messages": [ASK]},
    ANSWERS: {"input": "Who?"},
    OLLAMA: {"model": "reader", "prompt": "a", "stream": False},
}
WORDS = FakeEngine().vocab_size


def _parts(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "a", "any_order": True}] * count}]


def _use(role: str) -> list[dict[str, Any]]:
    return [ASK, {"role": role, "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]}, ASK]


class Case(NamedTuple):
    """A body by what it has besides those of `WHOLE`; None for a field that it lacks."""

    says: str
    path: str
    refused: dict[str, Any]
    served: dict[str, Any]


def _thinks(role: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [{"type": "thinking", "thinking": "Hm."}]}, ASK]}


CASES = [
    Case("must have one message at least where history names none", CHAT, {"messages": []}, {"messages": [ASK]}),
    Case("stop.0: Input should be a valid string", CHAT, {"stop": [1]}, {"stop": ["1"]}),
    Case(
        "messages.1.tool_calls.0: Input should be a valid dictionary",
        CHAT,
        {"messages": [ASK, CALLED | {"tool_calls": ["look"]}, ASK]},
        {"messages": [ASK, CALLED, ASK]},
    ),
    Case(
        "messages.0.content.0: Input should be a valid dictionary",
        CHAT,
        {"messages": [{"role": "user", "content": ["Who?"]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}]},
    ),
    Case(
        "input.1.output: Input should be a valid string",
        ANSWERS,
        {"input": [ASK, {"type": "function_call_output", "call_id": "1", "output": {"on": True}}]},
        {"input": [ASK, {"type": "function_call_output", "call_id": "1", "output": "on"}]},
    ),
    Case("must be a number, got true", CHAT, {"max_tokens": True}, {"max_tokens": 1}),
    Case("max_tokens must be 1 or more without echo", TEXT, {"max_tokens": 0}, {"max_tokens": 0, "echo": True}),
    Case("best_of must be n, 3, or more, got 2", TEXT, {"n": 3, "best_of": 2}, {"n": 3, "best_of": 3}),
    Case(
        "best_of must be n, 1, in a stream, got 2",
        TEXT,
        {"best_of": 2, "stream": True},
        {"best_of": 1, "stream": True},
    ),
    Case("prompt must not be an empty list", TEXT, {"prompt": []}, {"prompt": ["a"]}),
    Case("suffix needs prompts of text", TEXT, {"prompt": [5, 6], "suffix": "b"}, {"prompt": [5, 6], "suffix": ""}),
    Case("either texts or messages must be given", WARM, {}, {"messages": [ASK]}),
    Case("either texts or messages must be given", WARM, {"texts": ["a"], "messages": [ASK]}, {"texts": ["a"]}),
    Case("tools need messages", WARM, {"texts": ["a"], "tools": [TOOL]}, {"messages": [ASK], "tools": [TOOL]}),
    Case(
        "arguments of the chat template need messages",
        WARM,
        {"texts": ["a"], "enable_thinking": True},
        {"messages": [ASK], "enable_thinking": True},
    ),
    Case("ttl_s must be left out", SESSION, {"pinned": False, "ttl_s": 5}, {"pinned": True, "ttl_s": 5}),
    Case("one of pinned, ttl_s and priority must be given", SESSION, {}, {"priority": 0}),
    Case("one of pinned, ttl_s and priority must be given", SESSION, {"pinned": None}, {"pinned": False}),
    Case("one of pinned, ttl_s and priority must be given", SESSION, {"ttl_s": None}, {"ttl_s": 1}),
    Case(
        "content parts of type 5 are not served",
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": 5, "text": "a"}]}]},
        {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
    ),
    Case("functions is the older form of tools", CHAT, {"functions": [LOOK], "tools": [TOOL]}, {"functions": [LOOK]}),
    Case(
        "function_call is the older form of tool_choice",
        CHAT,
        {"functions": [LOOK], "function_call": "auto", "tool_choice": "auto"},
        {"functions": [LOOK], "function_call": "auto"},
    ),
    Case("function_call needs functions", CHAT, {"function_call": "auto"}, {"tool_choice": "auto"}),
    Case(
        "it must be of type 'function' or 'allowed_tools', got 'web_search'",
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "web_search", "function": LOOK}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": LOOK}},
    ),
    Case(
        "a message of role 'user' must have content",
        CHAT,
        {"messages": [{"role": "user"}]},
        {"messages": [CALLED, ASK]},
    ),
    Case("at most 32 parts with any_order, got 33", CHAT, {"messages": _parts(33)}, {"messages": _parts(32)}),
    Case("a message of role 'user' must not have reasoning", CHAT, _thinks("user"), _thinks("assistant")),
    Case(
        "it must not have 'messages', which the server gives",
        CHAT,
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"other": []}},
    ),
    Case("tool_choice needs tools", CHAT, {"tool_choice": "required"}, {"tool_choice": "none"}),
    Case(
        "tool_choice must name one of tools, got 'see'",
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "see"}}},
        {
            "tools": [TOOL, {"type": "function", "function": {"name": "see"}}],
            "tool_choice": {"type": "function", "function": {"name": "see"}},
        },
    ),
    Case(
        "continue_final_message needs add_generation_prompt to be false",
        CHAT,
        {"messages": [ASK, SAID], "continue_final_message": True, "add_generation_prompt": True},
        {"messages": [ASK, SAID], "continue_final_message": True, "add_generation_prompt": False},
    ),
    Case(
        "continue_final_message needs a last message of the assistant",
        CHAT,
        {"continue_final_message": True},
        {"messages": [ASK, SAID], "continue_final_message": True},
    ),
    Case(
        "continue_final_message needs a last message of the assistant",
        CHAT,
        {"messages": [ASK, SAID | CALLED], "continue_final_message": True},
        {"messages": [ASK, SAID | CALLED, SAID], "continue_final_message": True},
    ),
    Case("regex and choice must not be given together", CHAT, {"regex": "a", "choice": ["a"]}, {"regex": "a"}),
    Case("one must be of a type that is served", ANSWERS, {"input": [{"type": "web_search_call"}]}, {"input": [ASK]}),
    Case("responses are not stored", ANSWERS, {"input": [{"type": "item_reference", "id": "a"}]}, {"input": [ASK]}),
    Case("a raw prompt has all text itself", OLLAMA, {"raw": True, "system": "b"}, {"raw": True}),
    Case("a raw prompt has all text itself", OLLAMA, {"suffix": "c", "context": [5]}, {"context": [5]}),
    Case(
        "Answers beside tools can be JSON by a schema only",
        CHAT,
        {"tools": [TOOL], "regex": "a"},
        {"tools": [TOOL], "regex": "a", "tool_choice": "none"},
    ),
    Case(
        "blocks of type 5 are not served",
        CLAUDE,
        {"messages": [{"role": "user", "content": [{"type": 5, "text": "a"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ),
    Case(
        "blocks of type 'tool_use' cannot be in a message of role 'user'",
        CLAUDE,
        {"messages": _use("user")},
        {"messages": _use("assistant")},
    ),
    Case(
        "tool_choice of type 'tool' must name a tool",
        CLAUDE,
        {"tools": [LOOK | {"input_schema": {"type": "object"}}], "tool_choice": {"type": "tool"}},
        {"tools": [LOOK | {"input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}},
    ),
    Case(
        "the last message must not be a call of the assistant",
        COUNT,
        {"messages": _use("assistant")[:2]},
        {"messages": _use("assistant")},
    ),
    Case("history needs prompt_cache_key", CHAT, {"history": True}, {"history": False}),
    # Of those that know the model
    Case("Tokens must be from 0 to", TEXT, {"prompt": [1, WORDS]}, {"prompt": [1, WORDS - 1]}),
    Case("Tokens must be from 0 to", TEXT, {"prompt": [-1, 1]}, {"prompt": [0, 1]}),
    Case(
        "Tokens of logit_bias must be below",
        CHAT,
        {"logit_bias": {str(WORDS): 1}},
        {"logit_bias": {str(WORDS - 1): 1}},
    ),
    Case("stop_token_ids must be below", CHAT, {"stop_token_ids": [WORDS]}, {"stop_token_ids": [WORDS - 1]}),
    Case(
        "min_tokens must not be above max_tokens, 4, got 5",
        CHAT,
        {"max_tokens": 4, "min_tokens": 5},
        {"max_tokens": 4, "min_tokens": 4},
    ),
    Case("A prompt must have a token at least", TEXT, {"prompt": ""}, {"prompt": " "}),
    Case("The model has no tokens to fill in the middle", TEXT, {"suffix": "b"}, {"suffix": ""}),
    Case("One request may have 16 answers, got 17", TEXT, {"prompt": ["a"] * 17}, {"prompt": ["a"] * 16}),
    Case("a name is required", "/api/show", {"model": ""}, {"model": "reader"}),
]


def _said(at: Listening, case: Case, change: dict[str, Any]) -> tuple[int, str]:
    body = WHOLE.get(case.path, {}) | change
    response = at.http.request("PATCH" if case.path == SESSION else "POST", case.path, json=body)
    return response.status_code, response.text.replace('\\"', '"')


def test_a_body_is_refused_and_one_beside_it_is_not(at: Listening) -> None:
    """All in one test: cases of their own would be left to the night."""
    for case in CASES:
        status, text = _said(at, case, case.refused)
        assert (status, case.says in text) == (400, True), (case, text)
        status, text = _said(at, case, case.served)
        assert status == (404 if case.path == SESSION else 200), (case, text)  # there is no such session


def _sentences() -> Iterator[str]:
    """Patterns of what bodies say where they raise a ValueError; `test_edited_chats.py` has those of edits."""
    bodies = set(SERVER.glob("requests/*.py")) - {SERVER / "requests" / "edits.py"}
    for file in (*bodies, *SERVER.glob("apis/**/*schema*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and len(node.exc.args) == 1:
                text = node.exc.args[0]
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                yield ".*".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else "" for part in parts)


def test_each_sentence_has_a_case(at: Listening) -> None:
    said = [_said(at, case, case.refused)[1] for case in CASES]
    left = {each for each in _sentences() if each and not any(re.search(each, text) for text in said)}
    assert len(left) == 2, left  # of files
    assert all("messages" in each for each in left)
