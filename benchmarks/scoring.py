"""Few-shot multiple choice through lm_eval: its `hf` against `kvboost-hf`, in turns, over a real model on a CPU.

    python -m tests.environments libraries
    .venv-libraries/bin/python benchmarks/scoring.py --out benchmarks/results

Each of `--subjects` has a head of five solved questions, and `--questions` of its own with four choices, in words that
mean nothing. `letters` are scored as MMLU is: four continuations of one token, which `hf` reads off one row. `texts`
are scored as in `mmlu_continuation`: the choices themselves. `ideal` counts each distinct beginning of a text once.
Every run of `kvboost-hf` begins with an empty store, and both answer the same requests of lm_eval's `loglikelihood`.
Seconds are those that one thread was computing, so that other work on the machine is not counted.
"""

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from record import write
from targets import Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost_hf import ChunkStore, attach
from kvboost_hf.bench.run import provenance
from kvboost_hf.lm_eval import KVBoostHF
from recipes.real_model import FLOAT32, fetch
from tests.conftest import counted

SHOTS, LETTERS = 5, "ABCD"
WORDS = (
    "lamp box door tree river stone house bird cloud piano garden winter letter market bridge window silver copper "
    "paper engine number of the a is red blue which when above below every second first old new"
).split()
Requests = list[tuple[str, str]]


def words(chance: random.Random, least: int, most: int) -> str:
    """So many words."""
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(least, most)))


def requests(subjects: int, questions: int, *, letters: bool) -> Requests:
    """Contexts, and a continuation of each."""
    chance, found = random.Random(0), []
    for _ in range(subjects):
        head = f"The following are questions about {words(chance, 2, 4)}.\n\n"
        for number in range(SHOTS + questions):
            choices = [words(chance, 3, 12) for _ in LETTERS]
            listed = "".join(f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, choices, strict=True))
            asked = f"{words(chance, 40, 90).capitalize()}?\n{listed if letters else ''}Answer:"
            answers = list(LETTERS) if letters else choices
            if number < SHOTS:
                head += f"{asked} {chance.choice(answers)}\n\n"
            else:
                found += [(head + asked, f" {answer}") for answer in answers]
    return found


def ideal(lm: Any, asked: Requests) -> int:
    """Tokens to compute if each distinct beginning of a text is computed once."""
    texts = [context + continuation[:-1] for context, continuation in (lm._encode_pair(*each) for each in asked)]
    return len({tuple(text[: at + 1]) for text in texts for at in range(len(text))})


def run(lm: Any, asked: Requests) -> tuple[list[tuple[float, bool]], float, int]:
    """Answers, seconds and tokens."""
    instances = [Instance("loglikelihood", {}, each, number) for number, each in enumerate(asked)]
    with counted(lm.model) as work:
        began = time.process_time()
        answers = lm.loglikelihood(instances, disable_tqdm=True)
        return answers, time.process_time() - began, work.tokens


def measure(name: str, asked: Requests, batch_size: int, stock: HFLM, ours: KVBoostHF, store: ChunkStore) -> Result:
    """Both, one after the other."""
    stock.batch_size_per_gpu = ours.batch_size_per_gpu = batch_size
    store.clear()
    found, seconds, tokens = run(ours, asked)
    expected, plain_seconds, plain_tokens = run(stock, asked)
    picked: Callable[[list[Any]], list[int]] = lambda answers: [  # noqa: E731
        max(range(4), key=lambda number: answers[at + number][0]) for at in range(0, len(answers), 4)
    ]
    result = {
        "task": name,
        "batch_size": batch_size,
        "requests": len(asked),
        "ideal": ideal(ours, asked),
        "tokens": {"hf": plain_tokens, "kvboost-hf": tokens},
        "seconds": {"hf": round(plain_seconds, 2), "kvboost-hf": round(seconds, 2)},
        "same_choices": picked(found) == picked(expected),
        "max_difference": max(abs(a - b) for (a, _), (b, _) in zip(found, expected, strict=True)),
    }
    print(result, flush=True)
    return result


def markdown(result: Result) -> str:
    lines = [
        f"SmolLM2-135M-Instruct, float32; {result['subjects']} subjects of {result['questions']} questions; lm_eval "
        f"{result['lm_eval']}; {result['provenance']}",
        "",
        "| choices | batch size | ideal | hf | kvboost-hf | fewer tokens | hf | kvboost-hf | less time "
        "| same choices | largest difference |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for row in result["rows"]:
        tokens, seconds = row["tokens"], row["seconds"]
        lines.append(
            f"| {row['task']} | {row['batch_size']} | {row['ideal']:,} | {tokens['hf']:,} | {tokens['kvboost-hf']:,} "
            f"| {tokens['hf'] / tokens['kvboost-hf']:.1f}x | {seconds['hf']:.1f} s | {seconds['kvboost-hf']:.1f} s "
            f"| {seconds['hf'] / seconds['kvboost-hf']:.1f}x | {'yes' if row['same_choices'] else '**no**'} "
            f"| {row['max_difference']:.0e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    parser.add_argument("--subjects", type=int, default=3)
    parser.add_argument("--questions", type=int, default=12, help="of each subject")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    fetch()
    tokenizer = AutoTokenizer.from_pretrained(FLOAT32)
    plain, attached = (AutoModelForCausalLM.from_pretrained(FLOAT32, dtype=torch.float32).eval() for _ in range(2))
    store = ChunkStore(attached)
    ours = KVBoostHF(pretrained=attach(attached, store), tokenizer=tokenizer)
    stock = HFLM(pretrained=plain, tokenizer=tokenizer)
    result: Result = {"subjects": options.subjects, "questions": options.questions, "rows": []}
    result["lm_eval"] = sys.modules["lm_eval"].__version__
    result["provenance"] = str(provenance(f"`python benchmarks/scoring.py {' '.join(sys.argv[1:])}`", "cpu"))
    for name in ("texts", "letters"):
        asked = requests(options.subjects, options.questions, letters=name == "letters")
        for batch_size in options.batch_sizes:
            result["rows"].append(measure(name, asked, batch_size, stock, ours, store))
            write(options.out, "scoring-cpu", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
