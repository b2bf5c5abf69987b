"""Lines of system prompts that change with each request are left out, in whatever form they come, and named."""

import time
from typing import Any

import pytest

from tests.internals.server import without_changing_lines
from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

REST = "You are an agent.\n\nToday is the first of May."
ASK: list[Any] = [{"role": "user", "content": "Who?"}]


def _line(n: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.{n}.f4b; cc_entrypoint=cli; cch={n:05};"


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


FORMS: dict[str, Any] = {
    "own block": lambda line: ("/v1/messages", {"system": [_text(line), _text(REST)]}),
    "own block behind": lambda line: ("/v1/messages", {"system": [_text(REST), _text(line)]}),
    "one block": lambda line: ("/v1/messages", {"system": [_text(f"{line}\n{REST}")]}),
    "one block, apart": lambda line: ("/v1/messages", {"system": [_text(f"{line}\n\n{REST}")]}),
    "one line": lambda line: ("/v1/messages", {"system": [_text(f"{line} {REST}")]}),
    "windows": lambda line: ("/v1/messages", {"system": f"{line}\r\n{REST}"}),
    "text": lambda line: ("/v1/messages", {"system": f"{line}\n{REST}"}),
    "capitals": lambda line: ("/v1/messages", {"system": f"{line.replace('x-anth', 'X-Anth')}\n{REST}"}),
    "chat": lambda line: ("/v1/chat/completions", {"system": f"{line}\n{REST}"}),
    "chat, parts": lambda line: ("/v1/chat/completions", {"system": [_text(f"{line}\n"), _text(REST)]}),
    "chat, developer": lambda line: ("/v1/chat/completions", {"developer": f"{line}\n{REST}"}),
    "instructions": lambda line: ("/v1/responses", {"instructions": f"{line}\n{REST}", "input": ASK}),
    "ollama": lambda line: ("/api/chat", {"system": f"{line}\n{REST}", "stream": False}),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_billing_line_is_left_out_and_nothing_else(
    at: Listening, engine: FakeEngine, tokenizer: Any, form: str
) -> None:
    for n in (1, 20):
        route, body = FORMS[form](_line(n))
        messages = list(ASK)
        for role in ("system", "developer"):
            if route != "/v1/messages" and role in body:
                messages.insert(0, {"role": role, "content": body.pop(role)})
        response = at.http.post(route, json={"model": "reader", "messages": messages, "max_tokens": 5} | body)
        assert response.status_code == 200, response.text
        assert response.headers["x-kvboost-changed"] == "left-out:x-anthropic-billing-header"
    first, second = (list(ticket.job.ids) for ticket in engine.tickets)
    plain = [{"role": "system", "content": REST}, *ASK]
    told = tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert first == second
    assert tokenizer.decode(first).replace("\n\n<|im_end|>", "<|im_end|>") == tokenizer.decode(told)


def test_dates_are_kept_unless_the_operator_says_so(serve: Serve, engine: FakeEngine, tokenizer: Any) -> None:
    body = {"model": "reader", "messages": [{"role": "system", "content": "Be short.\nDate: 1 May\nId: 7"}, *ASK]}
    response = serve(engine).http.post("/v1/chat/completions", json=body)
    assert "Date: 1 May" in tokenizer.decode(engine.job.ids)
    assert "x-kvboost-changed" not in response.headers
    at = serve(engine, strip_heads=(r"Date: .*", r"Id: \d+"))
    response = at.http.post("/v1/chat/completions", json=body)
    assert "Be short.\n<|im_end|>" in tokenizer.decode(engine.job.ids)
    assert response.headers["x-kvboost-changed"] == "left-out:strip-head-1, left-out:strip-head-2"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Say x-anthropic-billing-header: a=b;", None),
        ("The header x-anthropic-billing-header is new.", None),
        ("x-anthropic-billing-header: opaque", ""),
        ("a\nx-anthropic-billing-header: v=1;\n\nb", "a\n\nb"),
        ("x-anthropic-billing-header:\nb", "b"),
        ("x-anthropic-billing-header: v=1;x=2\nb", "b"),
        ("\nb\n", None),
    ],
)
def test_lines(text: str, kept: str | None) -> None:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    found = without_changing_lines(messages, [])
    assert found[-1] == messages[-1]  # what the user says stays
    assert found[:-1] == ([{"role": "system", "content": kept or text}] if kept != "" else [])


def test_long_texts_take_no_time() -> None:
    start = time.thread_time()  # of this thread alone: others may keep it waiting
    for text in (
        "x-anthropic-billing-header: " + "a=" * 100_000,
        "a=b;" * 200_000,
        "x-anthropic-billing-header: a" * 9999,
    ):
        without_changing_lines([{"role": "system", "content": text}], [r"(a|b|=|;)+c"])
    assert time.thread_time() - start < 2


def test_patterns_that_are_none_are_refused(serve: Serve, engine: FakeEngine) -> None:
    with pytest.raises(ValueError, match="`strip_heads` must be regular expressions, got '\\('"):
        serve(engine, strip_heads=("(",))
