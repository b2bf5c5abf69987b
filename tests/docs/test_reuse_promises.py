"""What pages say of reuse is compared with what is reused: in examples by their own asserts, in sentences here."""

import re
from typing import Any

import pytest

from kvboost_hf import ChunkReuseCache, ChunkStore, KVBoost, KVQuantConfig, ReusePolicy
from kvboost_hf.assets import load_embedded
from tests.docs.pages import PAGES, blocks, name_of

# Each warms something or shows what was reused, and has to say how much that is.
_SHOWS = re.compile(r"\.warm\(|\.report\b|cached_tokens|kv_reuse_ratio|cache_read|prompt_tokens_details")
_COMPARES = re.compile(
    r"assert [^\n]*\b(reuse_ratio|kv_reuse_ratio|reused_tokens|moved_tokens|cached_tokens|cache_read|forwarded_tokens|"
    r"tier_tokens|bypass_reason)\b"
)
# The first is compared with its output, and the second sends one request, of which nothing can be reused.
_NOT_COMPARED = {"README.md": 1, "docs/server.md": 1}
_CALL = re.compile(r"`((?:store\.|engine\.)?warm\([^`]+\))`")

_TEXT = "You read documents and answer questions about them. " * 20
_FACTS = ["Anna lives in Rome. She likes soup. She plays the piano. " * 12, "The lamp is red. It is new. " * 20]
_SYSTEM = {"role": "system", "content": _TEXT.strip()}
_USER = {"role": "user", "content": "Where does Anna live?"}
_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def test_examples_that_show_reuse_compare_it() -> None:
    found: dict[str, int] = {}
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language == "python" and block.reason is None and _SHOWS.search(block.text):
                if not _COMPARES.search(block.text):
                    found[name_of(page)] = found.get(name_of(page), 0) + 1
    assert found == _NOT_COMPARED, "assert how much an example reuses: assert cache.report.reuse_ratio > 0.9"


def calls() -> dict[str, str]:
    """The calls of `warm` in sentences and tables, each with a page that has it."""
    found: dict[str, str] = {}
    for page in PAGES:
        for call in _CALL.findall(page.read_text(encoding="utf-8")):
            found.setdefault(" ".join(call.split()), name_of(page))
    return found


@pytest.mark.parametrize(("call", "page"), calls().items())
def test_warming_in_sentences_is_found(call: str, page: str) -> None:
    """By a prompt such as the call is for: a chat, a text, or documents in another order."""
    model, tokenizer = load_embedded()
    apply: Any = tokenizer.apply_chat_template
    engine = KVBoost(model, tokenizer, store=ChunkStore(model, chunk_size=16))
    live_quant = KVQuantConfig(key_bits=4, value_bits=4, exact_layers=0) if "live_quant" in call else None
    cache = ChunkReuseCache(model, engine.store, live_quant=live_quant)
    names = {
        "store": engine.store,
        "engine": engine,
        "tokenizer": tokenizer,
        "tools": _TOOLS,
        "system": _SYSTEM,
        "messages": [_SYSTEM],
        "text": _TEXT,
        "prompt": _TEXT,
        "documents": _FACTS,
        "config": live_quant,
    }
    given = re.sub(r"documents=(\[…\]|…)", "documents=documents, tokenizer=tokenizer", call)
    if not given.startswith(("store.", "engine.")):
        given = ("store." if "documents=" in given else "engine.") + given
    warmed = eval(given, names)
    text = _TEXT + _USER["content"]
    if "messages" in given:
        assert getattr(warmed, "report", warmed).start_reason is None
        tools = _TOOLS if "tools=" in given else None
        chat = [_SYSTEM, _USER]
        text = apply(chat, tools=tools, tokenize=False, add_generation_prompt=True)
    elif given.startswith("engine."):
        text = apply([{"role": "user", "content": text}], tokenize=False)
    elif "documents=" in given:
        text = "".join(reversed(_FACTS))
        cache = ChunkReuseCache(model, engine.store, ReusePolicy(mode="blend", min_prefill_saving=0))
    model.generate(**tokenizer(text, return_tensors="pt"), cache=cache, max_new_tokens=1)
    found = cache.report.moved_tokens if "documents=" in given else cache.report.reused_tokens
    assert found > 0.85 * cache.report.prompt_tokens, f"{page}: {call}: {cache.report}"
