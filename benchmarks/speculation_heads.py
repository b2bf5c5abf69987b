"""Counts what trained EAGLE-3 heads of the embedded reader give: tokens a pass, acceptance, and warm prompts.

    python -m recipes.train_heads --out HEADS --minutes 14
    python benchmarks/speculation_heads.py --heads HEADS --out benchmarks/results [--answers 60]

The answers are those of `speculation.py`. Chains are those of `generate(assistant_model=...)` at fixed lengths; trees
those of `generate(custom_generate=TreeDecoding(...))`; beside them the embedded draft model with the same lengths.
Each answer is also given over a `ChunkReuseCache`, cold, and warm from its store in a new cache: the tokens that both
models compute, before the first token of the answer and behind it. Nothing depends on how long anything takes.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import write
from reuse import Result, measured_on, provenance
from speculation import Task, answers, plain
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    DraftTreeConfig,
    ReusePolicy,
    TreeDecoding,
    load_assistant,
    speculation_stats,
)
from kvboost_hf.assets import load_embedded, load_embedded_draft
from kvboost_hf.assisted.rounds import SpeculationStats

LENGTHS = (1, 2, 3, 4, 5, 7)
SHAPES = {
    f"{depth} levels of {width}": DraftTreeConfig(policy="tree", depth=depth, width=width, branching=width)
    for depth, width in ((3, 4), (4, 4), (6, 8))
}


class Tokens(BaseStreamer):
    """Counts the tokens that heads compute, before the first token of an answer and behind it."""

    def __init__(self, heads: Any) -> None:
        self.first = self.rest = 0
        self._puts = 0
        self._handle = heads.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, heads: Any, args: Any, kwargs: Any) -> None:
        tokens = args[0].shape[1]
        if self._puts > 1:
            self.rest += tokens
        else:
            self.first += tokens

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1  # the prompt comes first

    def end(self) -> None:
        self._puts = 0

    def stop(self) -> None:
        self._handle.remove()


def arm(
    reader: PreTrainedModel,
    tasks: list[Task],
    expected: list[list[int]],
    how: dict[str, Any],
    stats: Callable[[], SpeculationStats],
) -> Result:
    """Answer all tasks; the counts of what was drafted."""
    for task, text in zip(tasks, expected, strict=True):
        mask = torch.ones_like(task.prompt)
        ids = reader.generate(task.prompt, attention_mask=mask, **task.options, **how)
        assert ids[0, task.prompt.shape[1] :].tolist() == text
    found = stats()
    tokens = sum(map(len, expected))
    passes = found.rounds + tokens - found.committed  # a pass without a draft gives one token
    return {
        "drafted": found.drafted,
        "accepted": found.accepted,
        "acceptance": found.acceptance,
        "passes": passes,
        "tokens_per_pass": tokens / passes,
    }


def warm(reader: PreTrainedModel, heads: PreTrainedModel, tasks: list[Task], expected: list[list[int]]) -> Result:
    """Tokens that both compute, cold and warm; what is drafted must be the same."""
    store, found = ChunkStore(reader, chunk_size=64), {}
    policy = ReusePolicy(min_prefill_saving=0)  # prompts are so short that computing them is as quick
    for name in ("cold", "warm"):
        before = speculation_stats(heads)
        drafted, accepted, forwarded = before.drafted, before.accepted, 0
        counted = Tokens(heads)
        for task, text in zip(tasks, expected, strict=True):
            cache = ChunkReuseCache(reader, store, policy)
            ids = reader.generate(
                task.prompt,
                attention_mask=torch.ones_like(task.prompt),
                assistant_model=heads,
                past_key_values=cache,
                streamer=counted,
                **task.options,
            )
            assert ids[0, task.prompt.shape[1] :].tolist() == text
            forwarded += cache.report.forwarded_tokens
            cache.store_tails()
        counted.stop()
        after = speculation_stats(heads)
        found[name] = {
            "reader": forwarded,
            "first": counted.first,
            "rest": counted.rest,
            "drafted": after.drafted - drafted,
            "accepted": after.accepted - accepted,
        }
    assert all(found["cold"][each] == found["warm"][each] for each in ("drafted", "accepted"))
    return found


def measure(folder: Path, count: int, seed: int) -> Result:
    reader, tokenizer = load_embedded()
    tasks = answers(tokenizer, count, seed)
    expected = plain(reader, tasks)
    found: Result = {"answers": len(tasks), "tokens": sum(map(len, expected)), "chains": {}, "trees": {}, "draft": {}}
    found["prompts"] = sum(task.prompt.shape[1] for task in tasks)
    for length in LENGTHS:
        constant: dict[str, Any] = {"schedule": "constant", "num_assistant_tokens": length}
        heads = load_assistant(str(folder), target=reader, **constant)
        found["chains"][length] = arm(
            reader, tasks, expected, {"assistant_model": heads}, lambda heads=heads: speculation_stats(heads)
        )
        trees = TreeDecoding(load_embedded_draft(), DraftTreeConfig(policy="tree", depth=length, width=1, branching=1))
        how = {"custom_generate": trees}
        found["draft"][length] = arm(reader, tasks, expected, how, lambda trees=trees: trees.stats)
        print(f"length {length}: {found['chains'][length]}", flush=True)
    heads = load_assistant(str(folder), target=reader, schedule="constant", num_assistant_tokens=4)
    for name, shape in SHAPES.items():
        trees = TreeDecoding(heads, shape)
        how = {"custom_generate": trees}
        found["trees"][name] = arm(reader, tasks, expected, how, lambda trees=trees: trees.stats)
        print(f"{name}: {found['trees'][name]}", flush=True)
    found["warm"] = warm(reader, heads, tasks, expected)
    own = sum(each.numel() for name, each in heads.named_parameters() if not name.startswith("embed_tokens"))
    found["weights"] = {"reader": reader.num_parameters(), "heads": own}
    return found


def markdown(result: Result) -> str:
    found = result["found"]
    lines = [
        measured_on(result["provenance"]),
        "",
        f"{found['answers']} answers of {found['tokens']} tokens in all, all of them as plain. The heads have "
        f"{found['weights']['heads']:,} weights, embeddings not counted; the reader has "
        f"{found['weights']['reader']:,}. The draft model, of one layer, drafts a chain behind the prompt, too.",
        "",
        "| | heads: accepted | tokens a pass | draft model: accepted | tokens a pass |",
        "| --- |" + " ---: |" * 4,
    ]
    for length, one in found["chains"].items():
        other = found["draft"][length]
        lines.append(
            f"| chains of {length} | {one['acceptance']:.0%} of {one['drafted']} | {one['tokens_per_pass']:.2f} "
            f"| {other['acceptance']:.0%} of {other['drafted']} | {other['tokens_per_pass']:.2f} |"
        )
    for name, one in found["trees"].items():
        lines.append(f"| {name} | {one['accepted']} of {one['drafted']} | {one['tokens_per_pass']:.2f} | | |")
    lines += [
        "",
        f"Tokens computed with chains of 4, over prompts of {found['prompts']} tokens in all:",
        "",
        "| | reader: prompts | heads: before the first token | behind it | accepted |",
        "| --- |" + " ---: |" * 4,
    ]
    for name, one in found["warm"].items():
        cells = [one[each] for each in ("reader", "first", "rest")]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} | {one['accepted']} of {one['drafted']} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, required=True, help="folder that recipes.train_heads has written")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    parser.add_argument("--answers", type=int, default=60)
    parser.add_argument("--seed", type=int, default=2, help="below 10 000, so that the prompts are held out")
    parser.add_argument("--threads", type=int, default=1, help="more take longer with models this small")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options.heads, options.answers, options.seed)
    result: Result = {"provenance": provenance(sys.argv[1:], "speculation_heads.py"), "found": found}
    write(options.out, "speculation-heads", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
