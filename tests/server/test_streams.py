"""Clients that go away, and servers that end."""

import json
import logging
import threading
from typing import Any

import httpx
import pytest

from tests.internals.server import make_app
from tests.server.conftest import SETTINGS, Listening, Serve, listening
from tests.server.fake_engine import FakeEngine, FakeTicket, require_cancelled

ASK: list[Any] = [{"role": "user", "content": "Who?"}]


def test_answers_that_are_heard_are_not_cancelled(at: Listening, engine: FakeEngine) -> None:
    said = []
    engine.before = lambda ticket, piece: said.append(ticket.cancelled.is_set())
    at.openai.chat.completions.create(model="reader", messages=ASK)
    list(at.openai.chat.completions.create(model="reader", messages=ASK, stream=True))
    assert said == [False] * 8


def test_no_text_ends_a_line(at: Listening, engine: FakeEngine) -> None:
    vars(engine).update(vars(FakeEngine("a\nb", "\u2028", "\x85\r")))
    body = {"model": "reader", "prompt": "a", "max_tokens": 3, "stream": True}
    with at.http.stream("POST", "/v1/completions", json=body) as response:
        *lines, done = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == "a\nb\u2028\x85\r"
    assert done == "[DONE]"


def test_a_silent_stream_pings(serve: Serve, endless: FakeEngine) -> None:
    at = serve(endless, ping_s=0.01)
    body = {"model": "reader", "messages": ASK, "stream": True}
    with at.http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith(":"):
                break
        else:
            pytest.fail("no ping")


def test_a_server_that_ends_answers_what_it_has_taken(tokenizer: Any, engine: FakeEngine) -> None:
    taken, ending = threading.Event(), threading.Event()

    def wait(ticket: FakeTicket, piece: int) -> None:
        taken.set()
        assert ending.wait(20)

    engine.before = wait
    answers: list[httpx.Response] = []
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        body = {"model": "reader", "messages": ASK}
        client = threading.Thread(
            target=lambda: answers.append(httpx.post(at.url + "/v1/chat/completions", json=body))
        )
        client.start()
        assert taken.wait(20)
        at.server.should_exit = True
        assert engine.drained is None
        ending.set()
        client.join(20)
    assert answers[0].json()["choices"][0]["message"]["content"] == "Anna plays the piano."
    assert engine.drained == SETTINGS.drain_s


def test_a_server_that_ends_gives_up_what_takes_too_long(tokenizer: Any, endless: FakeEngine) -> None:
    with listening(make_app(endless, tokenizer, SETTINGS), drain_s=1) as at:
        stream = at.openai.chat.completions.create(model="reader", messages=ASK, stream=True)
        next(iter(stream))
        at.server.should_exit = True
        require_cancelled(endless, 1)
        stream.close()


def test_no_text_is_logged(tokenizer: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(engine, tokenizer, SETTINGS)
    with caplog.at_level(logging.DEBUG, "kvboost_hf"), listening(app) as at:
        at.openai.chat.completions.create(model="reader", messages=[{"role": "user", "content": "secret"}])
        at.http.post("/v1/chat/completions", json={"model": "secret", "messages": ASK})
    told = [record for record in caplog.records if record.name.startswith("kvboost_hf.server")]
    assert len(told) == 2
    assert "secret" not in repr([record.__dict__ for record in told])
    assert "piano" not in repr([record.__dict__ for record in told])
