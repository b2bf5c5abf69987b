"""Keys of prompts for a router that has no tokenizer."""

import json
from typing import Any

from tests.internals.server import prompt_keys


def _chat(*texts: str, **more: Any) -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": text} for text in texts], **more}
    ).encode()


def test_a_chat_that_grows_begins_as_before() -> None:
    first, second = prompt_keys(_chat("a" * 600)), prompt_keys(_chat("a" * 600, "b" * 600))
    assert len(first) == 2
    assert second[:2] == first
    assert len(second) == 4
    assert prompt_keys(_chat("a" * 300 + "c" * 300))[1:] != first[1:]
    assert prompt_keys(_chat("a" * 600, temperature=1)) == first


def test_what_is_apart_for_the_store_is_apart() -> None:
    keys = [
        prompt_keys(_chat("a" * 600)),
        prompt_keys(_chat("a" * 600, prompt_cache_key="k")),
        prompt_keys(_chat("a" * 600, cache_salt="k")),
        prompt_keys(_chat("a" * 600), "Bearer one"),
        prompt_keys(_chat("a" * 600, tools=[{"type": "function"}])),
    ]
    assert len({key for chain in keys for key in chain}) == sum(map(len, keys))


def test_what_is_no_request_has_no_keys() -> None:
    for body in (b"", b"\xff", b"[1]", b"3", b"{", b"[" * 100_000, b'{"model": "m"}'):
        assert prompt_keys(body) == []
