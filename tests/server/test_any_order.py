"""Parts of messages in any order: they take the places of a stored prompt, and the client is told."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvboost_hf import ChunkStore
from kvboost_hf.assets import load_embedded
from tests.internals.server import ModelEngine
from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine

NOTES = [f"{name} lives in Rome. {name} likes soup. {name} plays the piano. " * 3 for name in ("Anna", "Tom", "Ruth")]


def body(order: tuple[int, ...], *, free: bool = True, **more: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Read these notes.\n\n"}]
    parts += [{"type": "text", "text": NOTES[at], **({"any_order": True} if free else {})} for at in order]
    parts += [{"type": "text", "text": "Where does Tom live?"}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0, **more}


@pytest.fixture
def served(tokenizer: Any, serve: Serve) -> Iterator[Listening]:
    model = load_embedded()[0]
    engine = ModelEngine(model, tokenizer, store=ChunkStore(model, chunk_size=16))
    yield serve(engine)
    engine.close()


def ask(at: Listening, given: dict[str, Any]) -> tuple[int, str | None, str]:
    """Cached tokens, what was changed, and the answer."""
    told = at.http.post("/v1/chat/completions", json=given)
    assert told.status_code == 200, told.text
    found = told.json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, told.headers.get("x-kvboost-changed"), found["choices"][0]["message"]["content"]


def test_parts_take_the_places_of_a_stored_prompt(served: Listening) -> None:
    ask(served, body((2, 0, 1)))
    as_given = ask(served, body((1, 2, 0), free=False))
    found = ask(served, body((1, 0, 2)))
    stored = ask(served, body((2, 0, 1), free=False))
    assert as_given[1] is None
    assert found[1] == "parts-reordered"
    assert found[0] > as_given[0] + 40
    assert found[0] == stored[0]
    assert found[2] == stored[2]


def test_off_where_nobody_asks_and_where_nothing_is_stored(served: Listening) -> None:
    assert ask(served, body((2, 0, 1)))[1] is None
    assert ask(served, body((0, 1, 2), free=False))[1] is None
    assert ask(served, body((1, 0, 2), cache_salt="somebody else"))[1] is None


def test_text_between_the_parts_stays(
    at: Listening, engine: FakeEngine, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine knows most of prompts that begin with the last part."""

    def known(prompts: Sequence[Sequence[int]], salt: bytes) -> list[int]:
        return [100 if "[1] Ruth" in tokenizer.decode(ids) else 0 for ids in prompts]

    monkeypatch.setattr(engine, "known_tokens", known)
    parts = [{"type": "text", "text": text} for text in ("[1] ", NOTES[0], " [2] ", NOTES[2], " [3]")]
    for at_part in (1, 3):
        parts[at_part]["any_order"] = True  # type: ignore[assignment]
    given = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    told = at.http.post("/v1/chat/completions", json=given)
    assert told.headers["x-kvboost-changed"] == "parts-reordered"
    text = tokenizer.decode(engine.job.ids)
    assert text.index("[1]") < text.index("Ruth") < text.index("[2]") < text.index("Anna") < text.index("[3]")


def test_too_many_parts_are_refused(at: Listening) -> None:
    parts = [{"type": "text", "text": "a", "any_order": True}] * 33
    told = at.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    assert told.status_code == 400
    assert "a message must have at most 32 parts with any_order, got 33" in told.text
