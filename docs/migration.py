"""Writes the page that maps names of kvboost: `python docs/migration.py > docs/migrating-from-kvboost.md`."""

import sys

from kvboost_hf.old_names import TABLE, Replacement

_TITLES = {
    "names": "Names of the package",
    "modules": "Modules of the package",
    "KVBoost": "`KVBoost(...)` and `KVBoost.from_pretrained(...)`",
    "methods": "Its methods",
    "generate": "Arguments of `generate`",
    "results": "Fields of results",
    "arguments of parts": "Arguments of parts",
    "StreamingConfig": "`StreamingConfig`",
    "speculation": "`SpeculativeConfig` and `TreeSpeculativeConfig`",
    "server flags": "Flags of the server",
    "endpoints": "Endpoints",
    "packages": "Packages and commands",
}
_OPENING = """# Migrating from kvboost

<!-- Written by `python docs/migration.py > docs/migrating-from-kvboost.md`: change the table. -->

**Who needs this:** your program was written for kvboost 0.9.0. Most programs need another import, and nothing else:

```python
from kvboost_hf import KVBoost
from kvboost_hf.assets import EMBEDDED_MODEL_DIR  # in its place: any hub name of a causal model

engine = KVBoost.from_pretrained(EMBEDDED_MODEL_DIR)
engine.warm("You read documents and answer questions about them. " * 4)
result = engine.generate(
    "You read documents and answer questions about them. " * 4 + "Maria lives in Rome.\\n\\nWhere does Maria live?"
)
print(result.output_text)
assert result.output_text == "Maria lives in Rome."
print(f"TTFT: {result.ttft_ms:.1f} ms | KV reuse: {result.kv_reuse_ratio:.0%}")
assert result.kv_reuse_ratio > 0.6
```

Each line below has a name of kvboost, behind an arrow what it is called here, and what to know; a name alone is the
same here. What is different on purpose:

- A text is sent as the message of a user where the tokenizer has a chat template. `KVBoost(chat_template=False)` sends
  texts as kvboost does, as they are.
- Without a `recompute_strategy` nothing is moved, and answers are those of plain `generate()`. Pass `"cacheblend"` or
  another one to use chunks anywhere in a prompt.
- The strategy that is chosen repairs all chunks that were moved. kvboost takes CacheBlend for chunks behind another
  text, whatever is chosen.
- What is not offered raises an error that says what to do in its place. Nothing is ignored.
- Times are from the call to a token on the host, everything included."""


def page() -> str:
    """The whole page."""
    parts = [_OPENING]
    for section, entries in TABLE.items():
        parts += [f"\n## {_TITLES[section]}\n"]
        parts += [_line(entry) for entry in entries]
    return "\n".join(parts) + "\n"


def _line(entry: Replacement) -> str:
    ours = [name.removeprefix("kvboost_hf.") for name in entry.ours]
    where = "" if ours == list(entry.names) else ", ".join(f"`{name}`" for name in ours)
    names = ", ".join(f"`{name}`" for name in entry.names)
    return "".join(
        ("- ", names, f" → {where}" if where else "", f": {entry.note}" if entry.note not in ("", "The same.") else "")
    )


if __name__ == "__main__":
    sys.stdout.write(page())
