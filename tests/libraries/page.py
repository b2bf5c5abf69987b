"""Outcomes as a table in Markdown."""

import re
import subprocess
from collections.abc import Sequence

import torch
import transformers

from tests.libraries.outcome import Outcome

_HEAD = """# Inside other libraries

**Who needs this:** a library calls `generate()` for you, such as LangChain, LlamaIndex, smolagents, outlines or TRL,
and you want to know whether [`attach(model)`](recipes/pipelines.md) works inside it. It serves every library that
calls the model's own `generate()`, and no setting of the library changes.

## What to know

- **Threads.** Each call has its own cache, and the store is shared. The last tokens of a call are stored before its
  streamer says that the stream has ended, or, without a streamer, when `generate()` returns. So the next request finds
  them in any thread. `last_cache(model).report` is that of the thread's own last call; in a thread that has made none,
  that of the last call of any thread.
- **Code that is given the cache** (a forward hook with keyword arguments on the attention, as kvpress has it, or a
  replaced forward): calls run on transformers' own cache and compute whole prompts, so the hook sees what it would see
  without this library. The report says so. A hook that only looks can set `hook.leaves_kv_alone = True`; then prompts
  are reused.
- **Other hooks.** Hooks that count or record do not matter, once they are in place. While a hook changes what is
  computed (steering), nothing is reused or stored, and the report names it.
- **Patches** of functions and methods are part of the key of stored K/V.
- **Edits** of `layer.keys` and `layer.values` never reach the store. A new prompt is then answered from the store, or
  computed. A text under way continues with the edit.
- **Scoring.** `model(ids, logits_to_keep=k)` without a cache is served, too. Without `logits_to_keep` all logits are
  wanted, and all tokens are computed, except with [`ReusePolicy(keep_logprobs=True)`](reuse.md#logits-of-all-tokens).
  [`score` and lm_eval](scoring.md) ask for as many logits as they need.
- **Static caches.** `generate(cache_implementation="static")` is served for models with full attention alone.

## What was run

The numbers are tokens that went through SmolLM2-135M-Instruct (float32, greedy, 12 new tokens for each call), new
tokens included. *Plain* is without this library, *Ours* after `attach(model)`. *Ideal* computes every token once; ours
has about 20 more for each model, to find out whether it gives the same logits for a prompt in two parts. *Same*: all
answers are token by token those of the plain run.

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
