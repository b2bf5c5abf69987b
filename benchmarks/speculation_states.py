"""What drafts are worth to models with states, whose states go back where drafts are rejected.

    PYTHONPATH=. python benchmarks/speculation_states.py --out benchmarks/results [--layers 24 --width 256]

Models are random, so that their drafts are bounds: an answer that a store knows, which is looked up there; a draft
that is a copy of the model, and always right; and one that is always wrong. Forwards are those of the model, prompts
included. Each arm is timed in turn; seconds are the least of all rounds, of the whole call.
"""

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from kinds import Size, kinds, make
from record import write
from reuse import measured_on, provenance
from targets import Result
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, DraftTreeConfig, TreeDecoding, lookup_assistant
from kvboost_hf.compat import own_hook

NAMES = ("linear and full, 3 to 1", "linear beside full, in one layer", "state only")
FIXED = DraftTreeConfig(policy="tree", depth=5)
ARMS = ("plain", "looked up", "always right, 5 tokens", "always wrong, 5 tokens", "always wrong, adaptive")


def drafts(arm: str, model: PreTrainedModel, other: PreTrainedModel, known: ChunkStore) -> TreeDecoding | None:
    if arm == "plain":
        return None
    if arm == "looked up":
        return TreeDecoding(lookup_assistant(model, known))
    draft = copy.deepcopy(model) if "right" in arm else other
    return TreeDecoding(draft, None if "adaptive" in arm else FIXED)


def answer(
    model: PreTrainedModel, ids: torch.Tensor, count: int, trees: TreeDecoding | None, cache: ChunkReuseCache
) -> Any:
    """The text, forwards, tokens in them, and seconds."""
    seen: list[int] = []
    table = model.get_input_embeddings()
    hook = own_hook(table.register_forward_hook, lambda _, args, out: seen.append(out.shape[1]))
    told: dict[str, Any] = {} if trees is None else {"custom_generate": trees}
    generate: Any = model.generate
    began = time.perf_counter()
    mask = torch.ones_like(ids)
    found = generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, cache=cache, **told)
    seconds = time.perf_counter() - began
    hook.remove()
    return found, seen, seconds


def measure(name: str, options: argparse.Namespace) -> Result:
    size = Size(options.width, options.layers, 32, 64, ())
    kind, more = kinds(size)[name]
    told = argparse.Namespace(device="cpu", shape="small")
    model, other = make(kind, more, size, told), make("llama", {"num_hidden_layers": 1}, size, told)
    ids = torch.randint(2, 1000, (1, 240), generator=torch.Generator().manual_seed(0))
    rows: dict[str, Result] = {}
    known = ChunkStore(model)
    kept = {arm: drafts(arm, model, other, known) for arm in ARMS}
    knows = ChunkReuseCache(model, known)
    expected, *_ = answer(model, ids, options.tokens, None, knows)
    knows.store_tails()
    for _ in range(options.rounds + 1):  # the first warms up
        for arm in ARMS:
            cache = ChunkReuseCache(model, ChunkStore(model))
            found, seen, seconds = answer(model, ids, options.tokens, kept[arm], cache)
            row = rows.setdefault(arm, {"same": True, "seconds": []})
            row["same"] = row["same"] and torch.equal(found, expected)
            row["seconds"].append(seconds)
            row["forwards"], row["tokens"] = len(seen), sum(seen) - ids.shape[1]
            trees = kept[arm]
            row["acceptance"] = trees.stats.acceptance if trees is not None else None
    for arm, row in rows.items():
        row["seconds"] = min(row["seconds"][1:])
        print(name, arm, row, flush=True)
    return rows


def markdown(result: Result) -> str:
    lines = [
        measured_on(result["provenance"]),
        "",
        f"Random models of {result['layers']} layers of {result['width']}, float32; prompts of 240 tokens, answers of "
        f"{result['new_tokens']}. The machine had other work.",
        "",
        "| model | drafts | as plain | accepted | forwards per token | tokens per token | seconds over plain |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, rows in result["models"].items():
        for arm, row in rows.items():
            accepted = "" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
            lines.append(
                f"| {name} | {arm} | {'yes' if row['same'] else 'no'} | {accepted} | "
                f"{row['forwards'] / result['new_tokens']:.2f} | {row['tokens'] / result['new_tokens']:.2f} | "
                f"{row['seconds'] / rows['plain']['seconds']:.2f} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    where = provenance(
        [f"--{name} {getattr(options, name)}" for name in ("layers", "width", "tokens", "rounds")],
        "speculation_states.py",
    )
    models = {name: measure(name, options) for name in NAMES}
    result = {
        "provenance": where,
        "layers": options.layers,
        "width": options.width,
        "new_tokens": options.tokens,
        "models": models,
    }
    write(options.out, "speculation-states", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
