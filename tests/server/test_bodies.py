"""What clients have sent, in two turns with a call of a tool between them: all of it is answered."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Listening
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

FOLDER = Path(__file__).with_name("bodies")
BODIES = [
    pytest.param(request, id=f"{file.stem}-{number}")
    for file in sorted(FOLDER.glob("*.json"))
    for number, request in enumerate(json.loads(file.read_text(encoding="utf-8"))["requests"])
]


@pytest.mark.parametrize("sent", BODIES)
def test_bodies_of_clients_are_answered(at: Listening, engine: FakeEngine, sent: dict[str, Any]) -> None:
    response = at.http.post(sent["path"], json=sent["body"], headers=sent.get("headers"))
    assert response.status_code == 200, response.text
    assert response.headers.get("x-kvboost-ignored", "") == sent["ignored"]
    assert "Anna" in response.text
    assert "piano" in response.text


@pytest.mark.parametrize("client", ["claude-code", "codex", "opencode", "cline"])
def test_a_second_turn_begins_with_all_of_the_first(at: Listening, engine: FakeEngine, client: str) -> None:
    for sent in json.loads((FOLDER / f"{client}.json").read_text(encoding="utf-8"))["requests"]:
        at.http.post(sent["path"], json=sent["body"])
    first, second = (list(ticket.job.ids) for ticket in engine.tickets)
    assert second[: len(first)] == first


def test_the_billing_header_of_claude_code_is_not_in_the_prompt(
    at: Listening, engine: FakeEngine, tokenizer: Any
) -> None:
    sent = json.loads((FOLDER / "claude-code.json").read_text(encoding="utf-8"))["requests"][1]
    prompts = []
    for changes in ("cch=1;", "cch=2;"):
        sent["body"]["system"][0]["text"] = f"x-anthropic-billing-header: cc_version=1; {changes}"
        at.http.post(sent["path"], json=sent["body"])
        prompts.append(list(engine.job.ids))
    assert prompts[0] == prompts[1]
    assert "billing" not in tokenizer.decode(prompts[0])


_ROUTES = {
    "/v1/chat/completions": {"model": "reader", "messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"model": "reader", "prompt": "a"},
    "/v1/responses": {"model": "reader", "input": "a"},
    "/v1/messages": {"model": "reader", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/api/chat": {"model": "reader", "messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"model": "reader", "prompt": "a"},
}


@pytest.mark.parametrize("path", _ROUTES)
@pytest.mark.parametrize("fault", [{}, {"colour": "red"}, {"model": [1]}, None])
def test_large_bodies_are_answered_as_small_ones(
    at: Listening, engine: FakeEngine, path: str, fault: dict[str, Any] | None
) -> None:
    """Large ones are checked in a thread."""

    def told(padding: int) -> tuple[Any, ...]:
        body: Any = ["a" * padding] if fault is None else _ROUTES[path] | fault | {"padding": "a" * padding}
        response = at.http.post(path, json=body)
        headers = response.headers
        error = response.json()["error"] if response.status_code != 200 and path[:4] != "/api" else None
        return response.status_code, error, headers.get("x-kvboost-ignored"), headers.get("x-kvboost-changed")

    small, large = told(1), told(70_000)
    assert large == small
    assert small[0] == (400 if fault is None or "model" in fault else 200)
