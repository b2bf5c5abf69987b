"""What a draft of the right length is worth, at four speeds of the target.

    python benchmarks/speculation.py --out benchmarks/results [--answers 40] [--forms 6] [--device cuda]

The embedded reader writes plainly, with its draft at fixed lengths, and with `load_assistant`. It answers held-out
prompts, each in a sentence; and it fills in forms of 8 questions about documents in one call of `generate()`. There
a logits processor writes the questions, as a grammar writes all but the values. So forms are long and easy to draft:
what the processor writes counts as accepted, too.

The rounds and what is accepted of them are those of real `generate()` calls. Time is not: a virtual clock goes forward
by T in every forward of the target, whatever its width, and by D in every forward of the draft. T/D is that of a
target in memory (5) and of targets that stream over three links (20, 60, 200). So the figures repeat on any machine.

The bound is `committed per round * T / (T + drafted per round * D)`, with the tokens that came to the target: a draft
ends where the text ends, however long it may be.

On a GPU, time is real, and so is the link: see speculation_link.py. `--shape tiny` does the same in seconds, anywhere.
With `--model`, a chat model writes without a draft model: see speculation_lookup.py.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import add_options, add_shape, write
from reuse import measured_on, provenance
from speculation_link import measure_link
from speculation_lookup import measure_lookup
from targets import Result
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from kvboost_hf import load_assistant
from kvboost_hf.assets import load_embedded, load_embedded_draft
from kvboost_hf.assets.world import ChatTurn, chat_messages, make_documents
from recipes.evaluate import encode_chat
from recipes.evaluate_draft import Round, Rounds, assisted_answer, held_out_prompts, use_constant_drafts

RATIOS = {"in memory": 5, "fast link": 20, "middle link": 60, "slow link": 200}
LENGTHS = range(1, 21)
QUESTIONS = 8  # of a form
WITHIN = 0.03  # of the best fixed length
KVBOOST = "KVBoost publishes 3.0 committed per round and 3.07x at length 5 and 40% accepted, with larger models."


class Form(LogitsProcessor):
    """Writes the questions of a form, one after each answer, and the end of the text after the last."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_length: int, questions: list[str]) -> None:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        self._start, self._end_of_turn = prompt_length, tokenizer.eos_token_id
        asked = [encode(f"\n<|im_start|>user\n{question}<|im_end|>") for question in questions]
        answering = encode("\n<|im_start|>assistant\n")
        self._scripts = [script for question in asked for script in (question, answering)] + [[tokenizer.pad_token_id]]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written = input_ids[0, self._start :].tolist()
        turns = written.count(self._end_of_turn)
        since = written[::-1].index(self._end_of_turn) if turns else 0
        script = self._scripts[turns - 1] if 0 < turns <= len(self._scripts) else []
        if since >= len(script):
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, script[since]] = 0
        return forced


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and the arguments of `generate()` that go with it."""

    prompt: torch.Tensor
    options: Result


def answers(tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[Task]:
    return [Task(prompt, {"max_new_tokens": 32}) for prompt in held_out_prompts(tokenizer, count, seed=seed)]


def forms(tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[Task]:
    tasks = []
    for index in range(count):
        rng = random.Random(f"{seed}/form/{index}")
        documents = tuple(make_documents(rng, 3, num_words=64))
        facts = rng.sample([fact for document in documents for fact in document.facts], QUESTIONS)
        prompt = encode_chat(tokenizer, chat_messages([ChatTurn(documents, facts[0])]))
        form = Form(tokenizer, prompt.shape[1], [fact.question for fact in facts[1:]])
        options = {"logits_processor": [form], "eos_token_id": tokenizer.pad_token_id, "max_new_tokens": 400}
        tasks.append(Task(prompt, options))
    return tasks


class VirtualClock:
    """Counts forwards, each at a price of its own."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    @contextmanager
    def priced(self, prices: dict[PreTrainedModel, float]) -> Iterator[None]:
        def charge(price: float) -> Any:
            def hook(*_: object) -> None:
                self.now += price

            return hook

        handles = [model.register_forward_hook(charge(price), prepend=True) for model, price in prices.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def plain(reader: PreTrainedModel, tasks: list[Task]) -> list[list[int]]:
    texts = []
    for task in tasks:
        ids = reader.generate(task.prompt, attention_mask=torch.ones_like(task.prompt), **task.options)
        texts.append(ids[0, task.prompt.shape[1] :].tolist())
    return texts


def assisted(reader: PreTrainedModel, draft: PreTrainedModel, tasks: list[Task], expected: list[list[int]]) -> Rounds:
    rounds: list[Round] = []
    for task, text in zip(tasks, expected, strict=True):
        written, found = assisted_answer(reader, draft, task.prompt, **task.options)
        assert written == text
        rounds += found
    return Rounds(tuple(rounds))


def report(found: Rounds, ratio: float, time: float) -> Result:
    per_round = found.drafted / len(found.rounds)
    return {
        "rounds": len(found.rounds),
        "drafted": found.drafted,
        "acceptance": found.acceptance,
        "committed_per_round": found.committed_per_round,
        "speed_up": found.committed * ratio / time,
        "bound": found.committed_per_round * ratio / (ratio + per_round),
    }


def measure(reader: PreTrainedModel, tasks: list[Task]) -> Result:
    expected = plain(reader, tasks)
    speeds: Result = {name: {"ratio": ratio, "fixed": {}} for name, ratio in RATIOS.items()}
    draft = load_embedded_draft()
    for length in LENGTHS:
        use_constant_drafts(draft, length)
        clock = VirtualClock()
        with clock.priced({draft: 1.0}):
            found = assisted(reader, draft, tasks, expected)
        for speed in speeds.values():
            time = len(found.rounds) * speed["ratio"] + clock.now
            speed["fixed"][length] = report(found, speed["ratio"], time)
        print(f"length {length}: {found.acceptance:.1%}, {found.committed_per_round:.2f}", flush=True)
    for name, speed in speeds.items():
        clock, draft = VirtualClock(), load_embedded_draft()
        assistant = load_assistant(draft, target=reader, clock=clock)
        with clock.priced({reader: speed["ratio"], assistant: 1.0}):
            found = assisted(reader, assistant, tasks, expected)
        speed["adaptive"] = report(found, speed["ratio"], clock.now)
        best = max(speed["fixed"], key=lambda length: speed["fixed"][length]["speed_up"])
        speed["best_length"] = best
        speed["of_best"] = speed["adaptive"]["speed_up"] / speed["fixed"][best]["speed_up"]
        print(f"{name}: {speed['of_best']:.3f} of length {best}", flush=True)
    return {"texts": len(tasks), "tokens": sum(map(len, expected)), "speeds": speeds}


def tables(name: str, found: Result) -> list[str]:
    lines = [
        f"## {name.capitalize()}",
        "",
        f"{found['texts']} {name} of {found['tokens']} tokens in all, the same in every arm. Speed-ups over plain.",
        "",
        "| length | accepted | committed per round |" + "".join(f" {n}, T/D {r} |" for n, r in RATIOS.items()),
        "| --- |" + " ---: |" * (2 + len(RATIOS)),
        "| none | | 1.00 |" + " 1.00x |" * len(RATIOS),
    ]
    speeds = list(found["speeds"].values())
    for length, one in speeds[0]["fixed"].items():
        cells = [f"{length}", f"{one['acceptance']:.0%}", f"{one['committed_per_round']:.2f}"]
        cells += [f"{speed['fixed'][length]['speed_up']:.2f}x" for speed in speeds]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| adaptive | accepted | committed per round | speed-up | bound | best fixed length | of its speed-up |",
        "| --- |" + " ---: |" * 6,
    ]
    for link, speed in found["speeds"].items():
        one, best = speed["adaptive"], speed["fixed"][speed["best_length"]]
        verdict = "within" if speed["of_best"] >= 1 - WITHIN else "not within"
        lines.append(
            f"| {link}, T/D {speed['ratio']} | {one['acceptance']:.0%} | {one['committed_per_round']:.2f} "
            f"| {one['speed_up']:.2f}x | {one['bound']:.2f}x | {speed['best_length']}: {best['speed_up']:.2f}x "
            f"| {speed['of_best']:.1%}, {verdict} {WITHIN:.0%} |"
        )
    return [*lines, ""]


def markdown(result: Result) -> str:
    lines = [measured_on(result["provenance"]), ""]
    for name in WORK:
        lines += tables(name, result[name])
    return "\n".join([*lines, KVBOOST]) + "\n"


WORK = {"answers": answers, "forms": forms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_shape(parser, "small")
    parser.add_argument("--answers", type=int, default=40)
    parser.add_argument("--forms", type=int, default=6)
    parser.add_argument("--seed", type=int, default=2, help="below 10 000, so that the prompts are held out")
    parser.add_argument("--threads", type=int, default=1, help="more take longer with models this small")
    parser.add_argument("--layers", type=int, default=24, help="of the target on a GPU: 253 MB each")
    parser.add_argument("--texts", type=int, default=2, help="to write on a GPU; with --model, of each kind of chat")
    parser.add_argument("--tokens", type=int, default=128, help="of each of these")
    parser.add_argument("--model", help="a chat model, as transformers takes it, for drafts that are looked up")
    parser.add_argument("--folder", type=Path, help="where weights are written, and removed again")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = provenance(sys.argv[1:], "speculation.py")
    if options.shape == "tiny" or options.device == "cuda":
        measure_link(options, where)
        return
    if options.model is not None:
        measure_lookup(options, where)
        return
    result: Result = {"provenance": where}
    reader, tokenizer = load_embedded()
    for name, tasks in WORK.items():
        result[name] = measure(reader, tasks(tokenizer, getattr(options, name), options.seed))
    write(options.out, "speculation", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
