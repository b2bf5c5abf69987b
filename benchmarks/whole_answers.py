"""Whole answers about moved documents: their time over that of plain `generate()`, how near they are, how often right.

    python benchmarks/whole_answers.py --out benchmarks/results

A word is hidden in each document: "The name of the dog is amber." A store has seen documents in four earlier
prompts, in other orders and choices. Then one of the words is asked for, with the beginning of the answer: "The name
of the dog is". A way to serve the prompt is right if it holds the word of that document for the likeliest of those
that are hidden in the prompt; the model is too small to answer such questions in its own words. For the first prompts,
the plain answer of 128 tokens is fed to each way as well: KL and same first choices are those of
`benchmarks.leaderboard`, and times are those of the first token, of 24 and of 128 tokens. Seconds are those that one
thread was computing. What the JSON holds is not measured again.
"""

import argparse
import json
import logging
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from record import write
from targets import Result
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.leaderboard.measure import answer, primed
from benchmarks.leaderboard.workloads import CHAPTERS, NOTES, SOURCES, Case, Pool, Question, prompt_of
from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from kvboost_hf.bench.run import provenance
from kvboost_hf.verify.measure import Call
from recipes.real_model import FLOAT32, fetch

NAME, SHORT, LONG = "whole-answers-cpu", 24, 128
KINDS = {"notes": NOTES, "sources": SOURCES, "chapters": CHAPTERS}
THINGS = (
    "the password",
    "the name of the dog",
    "the code name of the project",
    "the colour of the door",
    "the captain's nickname",
    "the title of the song",
    "the last word of the poem",
    "the stone in the ring",
    "the flower on the table",
    "the name of the boat",
    "the tree by the gate",
    "the street of the office",
)
WORDS = (
    "amber basalt cedar dahlia ember falcon garnet hazel indigo juniper kestrel lotus marble nectar onyx poppy quartz "
    "raven saffron topaz umber violet willow zephyr"
).split()


WAYS: dict[str, ReusePolicy | None] = {
    "plain": None,
    "the default": ReusePolicy(mode="blend"),
    "30%": ReusePolicy(mode="blend", recompute_ratio=0.3),
    "50%": ReusePolicy(mode="blend", recompute_ratio=0.5),
    '`repair="none"`': ReusePolicy(mode="blend", repair="none"),
    # These are fed the plain answer only.
    "exact": ReusePolicy(),
    "`progressive=16`": ReusePolicy(mode="blend", progressive=16),
    "`progressive=True`": ReusePolicy(mode="blend", progressive=True),
}
FED_ONLY = ("exact", "`progressive=16`", "`progressive=True`")


def hidden(document: str, sentence: str, chance: random.Random, *, code: bool) -> str:
    """A document with one more sentence, or one more line of comment."""
    parts = document.split("\n" if code else ". ")
    parts.insert(chance.randrange(1, len(parts)) if len(parts) > 1 else 0, f"# {sentence}." if code else sentence)
    return ("\n" if code else ". ").join(parts)


def draw(pool: Pool, tokenizer: Any, seed: int, asked: int) -> Case:
    """Questions about words in documents that four earlier prompts had in other orders."""
    chance = random.Random(f"words/{pool.title}/{seed}")
    documents = pool.drawn(tokenizer, seed)
    things, words = chance.sample(THINGS, len(documents)), chance.sample(WORDS, len(documents))
    told = [f"{thing[0].upper()}{thing[1:]} is {word}" for thing, word in zip(things, words, strict=True)]
    texts = [hidden(text, each, chance, code=pool is SOURCES) for text, each in zip(documents, told, strict=True)]

    def prompt(order: list[int], about: int) -> list[int]:
        ids = prompt_of(tokenizer, [texts[i] for i in order], f"What is {things[about]}?")
        return [*ids, *tokenizer.encode(told[about].removesuffix(f" {words[about]}"), add_special_tokens=False)]

    seen, known = [], set[int]()
    for _ in range(4):
        order = chance.sample(range(len(texts)), pool.take)
        known |= set(order)
        seen.append(prompt(order, chance.choice(order)))
    questions = []
    for _ in range(asked):
        order = chance.sample(sorted(known), pool.take)
        about = chance.choice(order)
        truth = " ".join([words[about], *(words[i] for i in order if i != about)])
        questions.append(Question(prompt(order, about), truth))
    return Case(questions, seen)


def is_right(tokenizer: Any, question: Question, found: Call) -> bool:
    """Whether the first of the words that are hidden in a prompt is the likeliest to come next."""
    assert question.truth is not None
    first = [tokenizer.encode(f" {word}", add_special_tokens=False)[0] for word in question.truth.split()]
    assert len({*first}) == len(first)
    return int(found.logits[0, first].argmax()) == 0


def answered(
    model: PreTrainedModel, tokenizer: Any, store: ChunkStore, question: Question
) -> Iterator[tuple[str, dict[str, float]]]:
    """Whether each way is right."""
    for name, policy in WAYS.items():
        if name not in FED_ONLY:
            cache = ChunkReuseCache(model, store, policy) if policy is not None else None
            own = answer(model, question.ids, 1, cache)
            yield name, {"right": float(is_right(tokenizer, question, own)), "first": own.times[0]}


def fed(
    model: PreTrainedModel, _tokenizer: Any, store: ChunkStore, question: Question
) -> Iterator[tuple[str, dict[str, float]]]:
    """How far each way is from plain, to which the plain answer is fed."""
    plain = answer(model, question.ids, LONG)
    for name, policy in WAYS.items():
        cache = ChunkReuseCache(model, store, policy) if policy is not None else None
        found = answer(model, question.ids, plain.ids, cache) if cache is not None else plain
        target, logs = (each.logits.double().log_softmax(-1) for each in (plain, found))
        kl = (target.exp() * (target - logs)).sum(-1)
        same = (plain.logits.argmax(-1) == found.logits.argmax(-1)).double()
        row = {"first": found.times[0], "short": found.times[SHORT - 1], "long": found.total_s}
        row |= {"kl_short": float(kl[:SHORT].mean()), "kl_long": float(kl.mean())}
        row |= {"same_short": float(same[:SHORT].mean()), "same_long": float(same.mean())}
        yield name, row


PARTS = {"own": answered, "fed": fed}


def table(result: Result) -> str:
    lines = [
        "# Whole answers about moved documents",
        "",
        f"SmolLM2-135M-Instruct, float32, sdpa, one thread; {result['provenance']}",
        "",
        "A word is hidden in each document, and asked for. `right`: prompts where that word is the likeliest to come",
        "next, of those that are hidden in the prompt. KL and same first choices: the plain answer of 128 tokens is",
        "fed to each way, for the first prompts.",
        "Times are medians over prompts, over that of plain `generate()`.",
    ]
    for kind, parts in result["kinds"].items():
        own, fed = parts.get("own", []), parts.get("fed", [])
        lines += [
            "",
            f"## {KINDS[kind].title}: {len(own)} prompts, of {len(fed)} the plain answer is fed",
            "",
            "| way | right | first token there | first token | 24 tokens | 128 tokens | KL, 24 | KL, 128 | same first "
            "choices, 24 | 128 |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for name in WAYS:
            asked = [each for each in own if name in each]
            right = f"{sum(each[name]['right'] for each in asked):.0f} of {len(asked)}" if asked else ""
            cells = [
                right,
                over(asked, name, "first"),
                *(over(fed, name, what) for what in ("first", "short", "long")),
            ]
            cells += [mean(fed, name, what, ".4f") for what in ("kl_short", "kl_long")]
            cells += [mean(fed, name, what, ".1%") for what in ("same_short", "same_long")]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def over(prompts: list[Any], name: str, what: str) -> str:
    """The median of a time over that of plain."""
    return f"{statistics.median(each[name][what] / each['plain'][what] for each in prompts):.2f}" if prompts else ""


def mean(prompts: list[Any], name: str, what: str, form: str) -> str:
    return format(statistics.mean(each[name][what] for each in prompts), form) if prompts else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--prompts", type=int, default=40, help="of each kind")
    parser.add_argument("--fed", type=int, default=4, help="of these, to which the plain answer is fed")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    fetch()
    model = AutoModelForCausalLM.from_pretrained(FLOAT32, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(FLOAT32)
    path = options.out / f"{NAME}.json"
    result: Result = json.loads(path.read_text()) if path.exists() else {"kinds": {}}
    result["provenance"] = str(provenance(f"`python benchmarks/whole_answers.py {' '.join(sys.argv[1:])}`", "cpu"))
    for part, count in (("own", options.prompts), ("fed", options.fed)):
        for kind in options.kinds:
            prompts = result["kinds"].setdefault(kind, {}).setdefault(part, [])
            for seed in range(len(prompts) // 8, -(-count // 8)):
                case = draw(KINDS[kind], tokenizer, seed, 8)
                store = primed(model, tokenizer, case)
                for question in case.asked[len(prompts) - seed * 8 : count - seed * 8]:
                    prompts.append(dict(PARTS[part](model, tokenizer, store, question)))
                    print(kind, part, len(prompts), [row.get("right") for row in prompts[-1].values()], flush=True)
                    write(options.out, NAME, result, table(result))
    print(table(result))


if __name__ == "__main__":
    main()
