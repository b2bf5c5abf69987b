"""Outcomes as a table in Markdown."""

import re
import subprocess
from collections.abc import Sequence

import torch
import transformers

from tests.libraries.outcome import Outcome

_HEAD = """# Inside other libraries

`attach(model)` serves every library that calls the model's own `generate()`: no setting of the library changes. This
page lists libraries and the ways through them that were run over SmolLM2-135M-Instruct (float32, greedy, 12 new tokens
for each call), and how many tokens went through the model.

- **Plain**: without this library. **Ours**: after `attach(model)`. Both count new tokens, too.
- **Ideal**: every token is computed once. Ours includes about 20 tokens that are computed once for each model, to find
  out whether it gives the same logits for a prompt in two parts.
- **Same**: all answers are token by token those of the plain run.

## What to know

- **Threads.** Each call has a cache of its own, and the store is shared. When `generate()` returns, its last tokens
  are stored, so that the next request finds them in any thread. `last_cache(model).report` tells of the thread's own
  last call, and in a thread that has made none, of the last call of any thread.
- **Code that is given the cache.** While a forward hook that gets keyword arguments sits on a module that is given
  the cache (as kvpress puts them on the attention), or such a module's forward was replaced, calls run on
  transformers' own cache, whole prompts and all: the hook sees what it would see without this library. The report
  says so. A hook that only looks can say so by an attribute, `hook.leaves_kv_alone = True`; then prompts are reused.
- **Other hooks.** Hooks that count or record do not matter, once they are in place. While a hook changes what is
  computed (steering), nothing is reused or stored, and the report names it.
- **Patches** of functions and methods are part of what stored K/V is found by.
- **Edits.** Whatever is written to `layer.keys` and `layer.values`, or put in their place, reaches nothing that is
  stored. A new prompt is then answered from the store, or computed; a text that goes on goes on with the edit.
- **Scoring.** `model(ids, logits_to_keep=k)` without a cache is served, too. Without `logits_to_keep`, all logits are
  wanted, and nothing can be left out but with [`ReusePolicy(keep_logprobs=True)`](reuse.md#logits-of-all-tokens).
  [`score` and lm_eval](scoring.md) ask for as many as they need.
- **Static caches.** `generate(cache_implementation="static")` is served for models with full attention alone.

## What was run

`make libraries` measures this again. Here: transformers {transformers}, torch {torch}, commit {commit}.

| Library | Version | Path | Plain | Ideal | Ours | Same | What is not reused, and why |
|---|---|---|--:|--:|--:|---|---|
"""


def page(outcomes: Sequence[Outcome]) -> str:
    """The page."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    head = _HEAD.format(transformers=transformers.__version__, torch=torch.__version__, commit=commit)
    return head + "".join(f"| {' | '.join(_cells(found))} |\n" for found in outcomes)


def _cells(found: Outcome) -> list[str]:
    counts = [f"{count:,}" for count in (found.plain, found.ideal, found.ours)]
    said = found.known or found.failure or ("" if found.as_ideal else found.why)
    notes = " without, ".join(filter(None, found.notes))
    if notes:
        said = f"{said}; {notes} with" if said else f"{notes} with"
    return [found.package, found.version, _code(found.path), *counts, "yes" if found.equal else "**no**", _text(said)]


def _code(path: str) -> str:
    return re.sub(r"[A-Za-z_.]*\w\([^)]*\)+|--[a-z-]+|\w+=", lambda found: f"`{found[0]}`", path.replace("|", r"\|"))


def _text(said: str) -> str:
    return " ".join(said.replace("|", r"\|").split())
