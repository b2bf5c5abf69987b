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
        prompt_keys(_chat("a" * 600, cache_salt="k")),
        prompt_keys(_chat("a" * 600), "Bearer one"),
        prompt_keys(_chat("a" * 600, tools=[{"type": "function"}])),
    ]
    assert len({key for chain in keys for key in chain}) == sum(map(len, keys))


def test_a_cache_key_leads_to_its_replica_and_shares_the_text() -> None:
    plain = prompt_keys(_chat("a" * 600))
    named, other = (prompt_keys(_chat("a" * 600, prompt_cache_key=name)) for name in ("k", "l"))
    assert named[1:] == other[1:] == plain
    assert named[0] != other[0]
    assert prompt_keys(_chat("b", prompt_cache_key="k")) == named[:1]
    assert prompt_keys(_chat("b", prompt_cache_key="")) == prompt_keys(_chat("b"))
    assert prompt_keys(_chat("b", prompt_cache_key="k"), "Bearer one") != named[:1]


def test_lines_that_are_no_part_of_prompts_lead_nowhere() -> None:
    line = "x-anthropic-billing-header: cch={};\n"
    keys = [prompt_keys(json.dumps({"system": line.format(n) + "a" * 600}).encode()) for n in (1, 22222)]
    assert keys[0] == keys[1] != []


def test_what_is_no_request_has_no_keys() -> None:
    for body in (b"", b"\xff", b"[1]", b"3", b"{", b"[" * 100_000, b'{"model": "m"}'):
        assert prompt_keys(body) == []
