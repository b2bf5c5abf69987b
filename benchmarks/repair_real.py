"""Repairs of moved chunks on a real model and real text: how far answers are from plain ones, and what they cost.

    python benchmarks/repair_real.py --out benchmarks/results

Prompts are chats of SmolLM2-135M-Instruct (`make real-model`) about documents. A store has seen the documents in
earlier prompts, in other orders and choices, or each of them alone; then a question is asked about some of them in an
order that is new. The store is frozen by then. generate() is made to give the tokens of the plain answer, so that
every arm is judged in the same contexts: by the KL divergence of its logits from the plain ones, and by how often its
first choice is the plain one. The clock runs from the call of generate() to the first logits; seconds are those that
one thread was computing, so that other work on the machine is not counted.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from record import Record, add_options
from repair_quality import FreezableStore, damage
from targets import Result
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ContentChunker, ReusePolicy
from kvboost_hf.assets.texts import prose, source
from kvboost_hf.assets.world import make_documents
from kvboost_hf.bench.provenance import provenance
from kvboost_hf.cache.planning.repair import REPAIRS, Measure, Repair
from recipes.real_model import load

_SYSTEM = "You are a careful assistant. You answer from the documents that you are given, in a few sentences."
_QUESTIONS = (
    "Summarize the most important points of these documents.",
    "Explain the third document in your own words.",
    "Which of these documents defines something, and what does it define?",
    "What should a programmer remember of these documents?",
    "Quote one important sentence of these documents, and explain it.",
)


class AttentionAlone(Repair):
    """ProphetKV's choice (https://arxiv.org/abs/2602.02579): attention of the question, wherever the seams are."""

    measure = Measure.ATTENTION


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to serve prompts.

    Args:
        policy: How stored K/V may be used.
        repair: In place of the one that the policy names.
        damage: "zeroed" or "shuffled" K/V in the store: a control.
    """

    policy: ReusePolicy
    repair: Repair | None = None
    damage: str | None = None


def once(repair: Any, ratio: float = 0.15, **settings: Any) -> ReusePolicy:
    """A policy whose repair ends with the first token."""
    return ReusePolicy(mode="blend", repair=repair, recompute_ratio=ratio, progressive=False, **settings)


_DEFAULT = "default: `query`, 15%, progressive"
ARMS: dict[str, Arm] = {
    "exact reuse": Arm(ReusePolicy()),
    "`none`": Arm(once("none")),
    "`first_k`, 15% (EPIC)": Arm(once("first_k")),
    "`selective`, 16 tokens": Arm(once("selective")),
    "`cacheblend`, 15%": Arm(once("cacheblend")),
    "attention alone, 15% (ProphetKV)": Arm(once("query"), AttentionAlone()),
    "`query`, 15%": Arm(once("query")),
    "`query`, 20%": Arm(once("query", 0.2)),
    "`query`, 30%": Arm(once("query", 0.3)),
    "`none`, progressive": Arm(ReusePolicy(mode="blend", repair="none")),
    _DEFAULT: Arm(ReusePolicy(mode="blend")),
    "`none`, zeroed K/V": Arm(once("none"), damage="zeroed"),
    "`none`, shuffled K/V": Arm(once("none"), damage="shuffled"),
    "`query`, 15%, shuffled K/V": Arm(once("query"), damage="shuffled"),
}
ALONE = ("`none`", "`first_k`, 15% (EPIC)", "`cacheblend`, 15%", "`query`, 15%", _DEFAULT)
CONTROLS = tuple(name for name, arm in ARMS.items() if arm.damage is not None)  # on one kind of prompts


@dataclass(frozen=True, slots=True)
class Case:
    """Documents that a store has seen, and prompts about some of them in another order.

    Args:
        documents: All of them.
        seen: Token ids of the earlier prompts.
        asked: Token ids of the prompts that are measured.
        truths: Words that a right answer to each of those holds; empty where that is not known.
    """

    documents: list[str]
    seen: list[list[int]]
    asked: list[list[int]]
    truths: list[str] = field(default_factory=list)


def prompt(tokenizer: Any, documents: Sequence[str], question: str) -> list[int]:
    """Token ids of a chat that asks about documents."""
    text = "".join(f"Document:\n{document}\n\n" for document in documents)
    chat = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": f"{text}Question: {question}"}]
    ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return ids


def pool_case(tokenizer: Any, documents: list[str], take: int, asked: int, seed: str) -> Case:
    """Earlier prompts and new ones of `take` documents each."""
    chance = random.Random(seed)
    seen: list[list[int]] = []
    known: set[int] = set()
    for _ in range(4):
        order = chance.sample(range(len(documents)), take)
        known |= set(order)
        seen.append(prompt(tokenizer, [documents[i] for i in order], chance.choice(_QUESTIONS)))
    wanted = [chance.sample(sorted(known), take) for _ in range(asked)]
    prompts = [prompt(tokenizer, [documents[i] for i in order], chance.choice(_QUESTIONS)) for order in wanted]
    return Case(documents, seen, prompts)


def linked_case(tokenizer: Any, count: int, asked: int, seed: str) -> Case:
    """Documents of which each but the first begins with a pronoun for the last subject of the one before."""
    chance = random.Random(seed)
    made = make_documents(chance, count, num_words=80, pronoun_start=True)
    texts = [document.text for document in made]
    facts = [fact for document in made for fact in document.facts]
    seen = []
    for _ in range(2):
        order = chance.sample(range(count), count)
        seen.append(prompt(tokenizer, [texts[i] for i in order], chance.choice(facts).question))
    wanted = chance.sample(facts, asked)
    prompts = [prompt(tokenizer, texts, fact.question) for fact in wanted]
    return Case(texts, seen, prompts, [fact.value for fact in wanted])


def cases(tokenizer: Any, kind: str, seed: int, asked: int) -> Case:
    """A case of a kind; every seed draws other text."""

    def count(text: str) -> int:
        return len(tokenizer(text).input_ids)

    drawn = f"{kind}/{seed}"
    if kind == "six notes of 220 tokens":
        return pool_case(tokenizer, prose(220, count, seed)[:12], 6, asked, drawn)
    if kind == "four chapters of 600 tokens":
        return pool_case(tokenizer, prose(600, count, seed)[:7], 4, asked, drawn)
    if kind == "five source files of 280 tokens":
        return pool_case(tokenizer, source(280, count, seed)[:9], 5, asked, drawn)
    return linked_case(tokenizer, 10, asked, drawn)


KINDS = (
    "six notes of 220 tokens",
    "four chapters of 600 tokens",
    "five source files of 280 tokens",
    "ten linked documents of 110 tokens",
)


class Forced(LogitsProcessor):
    """Has generate() give certain tokens, and takes the time at which the first logits are there."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._at = tokens, 0
        self.first: float | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.first is None:
            self.first = time.process_time()
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._tokens[self._at]] = 0.0
        self._at += 1
        return forced  # type: ignore[return-value]


def answer(
    model: PreTrainedModel, ids: Sequence[int], tokens: Sequence[int], cache: Any = None
) -> tuple[torch.Tensor, float, float]:
    """Logits [tokens, vocabulary], and the seconds to the first of them and to the last."""
    inputs = torch.tensor([list(ids)])
    forced = Forced(tokens)
    generate: Any = model.generate
    began = time.process_time()
    out = generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        past_key_values=cache,
        max_new_tokens=len(tokens),
        min_new_tokens=len(tokens),
        do_sample=False,
        logits_processor=LogitsProcessorList([forced]),
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert forced.first is not None
    return torch.stack([step[0] for step in out.logits]), forced.first - began, time.process_time() - began


@contextmanager
def in_place_of(name: str, repair: Repair | None) -> Iterator[None]:
    """Within it, a policy that names a repair gets another one."""
    before = REPAIRS[name]
    if repair is not None:
        REPAIRS[name] = repair
    try:
        yield
    finally:
        REPAIRS[name] = before


def primed(model: PreTrainedModel, tokenizer: Any, case: Case, *, alone: bool) -> FreezableStore:
    """A frozen store that has seen the documents."""
    store = FreezableStore(model, chunker=ContentChunker.for_tokenizer(tokenizer))
    if alone:
        chat = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "Document:\n|"}]
        prefix = tokenizer.apply_chat_template(chat, tokenize=False).split("|<|im_end|>")[0].removesuffix("|")
        store.warm(documents=case.documents, prefix=prefix, tokenizer=tokenizer)
    else:
        for ids in case.seen:
            store.warm(ids)
    store.frozen = True
    return store


def measure(
    model: PreTrainedModel, tokenizer: Any, case: Case, arms: dict[str, Arm], new: int, *, alone: bool = False
) -> list[Result]:
    """A row of figures for each prompt of a case and each arm."""
    stores = {
        kind: primed(model, tokenizer, case, alone=alone) for kind in dict.fromkeys(a.damage for a in arms.values())
    }
    for kind, store in stores.items():
        if kind is not None:
            damage(store, kind)
    rows: list[Result] = []
    for at, ids in enumerate(case.asked):
        inputs = torch.tensor([ids])
        generate: Any = model.generate
        said = generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        tokens = said[0, len(ids) :].tolist()
        plain, plain_first, plain_all = answer(model, ids, tokens)
        target = plain.double().log_softmax(-1)
        for name, arm in arms.items():
            cache = ChunkReuseCache(model, stores[arm.damage], arm.policy)
            with in_place_of("query", arm.repair):
                logits, first, whole = answer(model, ids, tokens, cache)
            found = logits.double().log_softmax(-1)
            kl = (target.exp() * (target - found)).sum(-1)
            agree = logits.argmax(-1) == plain.argmax(-1)
            report = cache.report
            rows.append(
                {
                    "arm": name,
                    "kl": float(kl.mean()),
                    "kl_first": float(kl[0]),
                    "agreement": float(agree.double().mean()),
                    "first_agrees": float(agree[0]),
                    "computed": report.forwarded_tokens / len(ids),
                    "repaired": report.repaired_tokens / len(ids),
                    "moved": report.moved_tokens / len(ids),
                    "first_token": first / plain_first,
                    "answer": whole / plain_all,
                    "prompt": len(ids),
                    **right(tokenizer, case, at, tokens, logits),
                }
            )
    return rows


def right(tokenizer: Any, case: Case, at: int, tokens: Sequence[int], logits: torch.Tensor) -> Result:
    """Whether an arm's first choices hold the truth, where plain's answer does."""
    if not case.truths or case.truths[at] not in tokenizer.decode(tokens):
        return {}
    return {"right": float(case.truths[at] in tokenizer.decode(logits.argmax(-1)))}


def summary(rows: list[Result]) -> list[Result]:
    """Means over prompts, arm by arm; of times the median."""
    found: list[Result] = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == name]
        line: Result = {"arm": name, "prompts": len(own)}
        for figure in ("kl", "kl_first", "agreement", "first_agrees", "computed", "repaired", "moved"):
            line[figure] = statistics.fmean(row[figure] for row in own)
        for figure in ("first_token", "answer"):
            line[figure] = statistics.median(row[figure] for row in own)
        judged = [row["right"] for row in own if "right" in row]
        if judged:
            line["right"], line["judged"] = sum(judged), len(judged)
        found.append(line)
    return found


def markdown(result: Result) -> str:
    """The tables."""
    lines = ["# Repairs on a real model", ""]
    for title, rows in result["cases"].items():
        found = summary(rows)
        truths = any("right" in line for line in found)
        lengths = sorted({row["prompt"] for row in rows})
        lines += [
            f"## {title}",
            "",
            f"{found[0]['prompts']} prompts of {lengths[0]} to {lengths[-1]} tokens.",
            "",
            "| arm | KL, mean | KL, first token | same first choice | computed before the first token | after it "
            "| first token, of plain | whole answer, of plain |" + (" right |" if truths else ""),
            "| --- |" + " ---: |" * (7 + truths),
        ]
        for line in found:
            row = (
                f"| {line['arm']} | {line['kl']:.4f} | {line['kl_first']:.4f} | {line['agreement']:.1%} "
                f"| {line['computed']:.0%} | {line['repaired']:.0%} | {line['first_token']:.2f} "
                f"| {line['answer']:.2f} |"
            )
            lines.append(row + (f" {line['right']:.0f} of {line['judged']} |" if "right" in line else ""))
        lines.append("")
    return "\n".join([*lines, result["provenance"], ""])


def main() -> None:
    """Measure all kinds of prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=tuple(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12], help="each draws other text")
    parser.add_argument("--asked", type=int, default=3, help="prompts of each kind and seed")
    parser.add_argument("--new", type=int, default=24, help="tokens of an answer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load()
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.to(options.device)
    arms = {name: ARMS[name] for name in options.arms}
    result: Result = {
        "provenance": str(provenance("python benchmarks/repair_real.py --out benchmarks/results", options.device)),
        "cases": {},
    }
    record = Record("repair-real-cpu", options, result, markdown)

    def add(title: str, case: Case, arms: dict[str, Arm], *, alone: bool) -> None:
        found = measure(model, tokenizer, case, arms, options.new, alone=alone)
        result["cases"].setdefault(title, []).extend(found)

    warm_up = linked_case(tokenizer, 3, 1, "warm up")  # models are probed once
    measure(model, tokenizer, warm_up, arms, 2)
    for kind in options.kinds:
        for seed in options.seeds:
            case = cases(tokenizer, kind, seed, options.asked)
            title = f"{kind[0].upper()}{kind[1:]}"
            some = {name: arm for name, arm in arms.items() if kind == KINDS[0] or name not in CONTROLS}
            record.measure(f"{title}, {seed}", partial(add, title, case, some, alone=False))
            if kind == KINDS[0]:
                some = {name: arm for name, arm in arms.items() if name in ALONE}
                title = f"{title}, each of them stored alone"
                record.measure(f"{title}, {seed}", partial(add, title, case, some, alone=True))
    record.show()


if __name__ == "__main__":
    main()
