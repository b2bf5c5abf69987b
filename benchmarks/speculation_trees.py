"""What trees of drafts are worth beside chains, at four speeds of the target and with drafts of four qualities.

    python benchmarks/speculation_trees.py --out benchmarks/results [--answers 20] [--forms 3]

The work and the virtual clock are those of `speculation.py`: T for every forward of the target, whatever its width,
and D for every forward of the draft. The draft is the embedded one, and the same with noise in its weights: by so many
standard deviations of each tensor. Chains are those of stock `generate(assistant_model=...)` at each fixed length from
1 to 20, and `load_assistant`'s; trees are those of `generate(custom_generate=TreeDecoding(...))`.

At equal passes of the target, what counts is the tokens that each pass gives; on the clock, drafting counts, too.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from record import write
from reuse import Result, measured_on, provenance
from speculation import LENGTHS, RATIOS, WORK, Task, VirtualClock, assisted, plain
from transformers import PreTrainedModel

from kvboost_hf import DraftTreeConfig, TreeDecoding, load_assistant
from kvboost_hf.assets import load_embedded, load_embedded_draft
from recipes.evaluate_draft import use_constant_drafts

NOISE = (0.0, 0.25, 0.4, 0.6)
SHAPES = {
    f"{depth} levels of {width}": DraftTreeConfig(policy="tree", depth=depth, width=width, branching=width)
    for depth, width in ((4, 4), (8, 4), (12, 8), (20, 8))
}


def noisy_draft(share: float) -> PreTrainedModel:
    draft = load_embedded_draft()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for parameter in draft.parameters():
            parameter += share * parameter.std() * torch.randn_like(parameter)
    return draft


class Passes:
    """Counts forwards of both models."""

    def __init__(self, reader: PreTrainedModel, draft: PreTrainedModel) -> None:
        self._clocks = {"target": VirtualClock(), "draft": VirtualClock()}
        self._models = {"target": reader, "draft": draft}

    def __enter__(self) -> "Passes":
        self._open = [self._clocks[name].priced({model: 1.0}) for name, model in self._models.items()]
        for each in self._open:
            each.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._open:
            each.__exit__(None, None, None)

    def report(self, tokens: int) -> Result:
        """Tokens for each pass, and speed-ups over plain decoding, which takes a pass for each token."""
        target, draft = self._clocks["target"].now, self._clocks["draft"].now
        speed_ups = {name: tokens * ratio / (target * ratio + draft) for name, ratio in RATIOS.items()}
        return {"target": target, "draft": draft, "tokens_per_pass": tokens / target, "speed_ups": speed_ups}


def by_trees(reader: PreTrainedModel, trees: TreeDecoding, tasks: list[Task], expected: list[list[int]]) -> None:
    for task, text in zip(tasks, expected, strict=True):
        mask = torch.ones_like(task.prompt)
        ids = reader.generate(task.prompt, attention_mask=mask, custom_generate=trees, **task.options)
        assert ids[0, task.prompt.shape[1] :].tolist() == text


def measure(reader: PreTrainedModel, share: float, tasks: list[Task], expected: list[list[int]]) -> Result:
    draft, tokens = noisy_draft(share), sum(map(len, expected))
    found: Result = {"chains": {}, "trees": {}, "adaptive": {}, "auto": {}}
    for length in LENGTHS:
        use_constant_drafts(draft, length)
        with Passes(reader, draft) as passes:
            rounds = assisted(reader, draft, tasks, expected)
        found["chains"][length] = passes.report(tokens) | {"acceptance": rounds.acceptance}
    for name, config in SHAPES.items():
        trees = TreeDecoding(draft, config)
        with Passes(reader, draft) as passes:
            by_trees(reader, trees, tasks, expected)
        found["trees"][name] = passes.report(tokens)
    for name, ratio in RATIOS.items():
        clock = VirtualClock()
        trees = TreeDecoding(draft, clock=clock)
        with clock.priced({reader: ratio, draft: 1.0}), Passes(reader, draft) as passes:
            by_trees(reader, trees, tasks, expected)
        found["auto"][name] = passes.report(tokens)
        clock, chain = VirtualClock(), noisy_draft(share)
        assistant: Any = load_assistant(chain, target=reader, clock=clock)
        with clock.priced({reader: ratio, chain: 1.0}), Passes(reader, chain) as passes:
            assisted(reader, assistant, tasks, expected)
        found["adaptive"][name] = passes.report(tokens)
    return found


def best(arms: Result, key: Any) -> Any:
    return max(arms, key=lambda name: key(arms[name]))


def table(found: dict[float, Result]) -> list[str]:
    lines = [
        "| noise | accepted at length 5 | best chain | best tree | more tokens a pass |",
        "| ---: |" + " ---: |" * 4,
    ]
    for share, one in found.items():
        chain, tree = (best(one[kind], lambda arm: arm["tokens_per_pass"]) for kind in ("chains", "trees"))
        mine, theirs = one["trees"][tree]["tokens_per_pass"], one["chains"][chain]["tokens_per_pass"]
        lines.append(
            f"| {share} | {one['chains'][5]['acceptance']:.0%} | {chain}: {theirs:.2f} | {tree}: {mine:.2f} "
            f"| {mine / theirs - 1:+.0%} |"
        )
    lines += ["", "Speed-up over plain decoding on the clock:", ""]
    lines += [
        "| noise | | best chain | `load_assistant` | best fixed tree | `TreeDecoding` |",
        "| ---: | --- |" + " ---: |" * 4,
    ]
    for share, one in found.items():
        for name, ratio in RATIOS.items():
            kinds = {kind: best(one[kind], lambda arm, n=name: arm["speed_ups"][n]) for kind in ("chains", "trees")}
            cells = [f"{which}: {one[kind][which]['speed_ups'][name]:.2f}x" for kind, which in kinds.items()]
            adaptive, auto = (one[arms][name]["speed_ups"][name] for arms in ("adaptive", "auto"))
            lines.append(f"| {share} | T/D {ratio} | {cells[0]} | {adaptive:.2f}x | {cells[1]} | {auto:.2f}x |")
    return lines


def markdown(result: Result) -> str:
    lines = [measured_on(result["provenance"]), ""]
    for name in WORK:
        one = result[name]
        lines += [f"## {name.capitalize()}", "", f"{one['texts']} {name} of {one['tokens']} tokens in all.", ""]
        lines += [*table(one["found"]), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    parser.add_argument("--answers", type=int, default=20)
    parser.add_argument("--forms", type=int, default=3)
    parser.add_argument("--seed", type=int, default=2, help="below 10 000, so that the prompts are held out")
    parser.add_argument("--threads", type=int, default=1, help="more take longer with models this small")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: Result = {"provenance": provenance(sys.argv[1:], "speculation_trees.py")}
    reader, tokenizer = load_embedded()
    for name, make in WORK.items():
        tasks = make(tokenizer, getattr(options, name), options.seed)
        expected = plain(reader, tasks)
        found = {}
        for share in NOISE:
            found[share] = measure(reader, share, tasks, expected)
            print(f"{name}, noise {share}", flush=True)
        result[name] = {"texts": len(tasks), "tokens": sum(map(len, expected)), "found": found}
    write(options.out, "speculation-trees", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
