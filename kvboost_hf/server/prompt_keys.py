"""Makes chained keys of a prompt's text, for routers without a tokenizer."""

import json
import re

from kvboost_hf.cache.planning.chunks import digest, root_key

_PIECE = 256  # characters
_CHANGING = re.compile(r'x-anthropic-billing-header:[^"\\]*')  # no part of prompts
# In the order in which prompts have them.
_FIELDS = ("tools", "instructions", "system", "context", "messages", "prompt", "input", "texts")


def prompt_keys(body: bytes, authorization: str = "") -> list[bytes]:
    """Keys of the leading pieces of a prompt: requests that share some begin with the same text, for the same client.

    Args:
        body: The body of a request to any route of the server.
        authorization: What clients are told apart by, besides the body's `cache_salt`.

    Returns:
        One of the body's `prompt_cache_key`, if it has one, and one for each 256 characters; none for what is no JSON
        object, which the server will refuse.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(asked, dict):
        return []
    text = _CHANGING.sub("", json.dumps([asked[name] for name in _FIELDS if asked.get(name) is not None])).encode()
    owner = repr((authorization, asked.get("cache_salt"))).encode()
    key = root_key(b"text", owner)
    session = asked.get("prompt_cache_key")
    keys: list[bytes] = [] if session is None else [root_key(b"session", owner + repr(session).encode())]
    for stop in range(_PIECE, len(text) + 1, _PIECE):
        keys.append(key := digest(key, text[stop - _PIECE : stop]))
    return keys
