"""How often answers part from plain generate() when K/V is reused, by dtype, over chats about real text.

    python -m recipes.real_model
    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/half_precision.py --out benchmarks/results [--costs]

A chat has a passage of real text in its first message, and a question in each of 8 turns. Its history is that of plain
generate(), which computes every prompt whole. Each way answers the same prompts, and keeps what it keeps from turn to
turn:

- `by hand`: a stock DynamicCache, cut by hand to the tokens that the next prompt begins with;
- `live`: one ChunkReuseCache; `store`: a new one for each turn, over one store;
- `prefill_chunk_size=64` and `two equal rows`: no reuse at all, plain generate() in other shapes;
- `reproducible`: `ReusePolicy(reproducible=True)` with nothing stored, whose logits are also compared bit by bit with
  those of a cache that is kept, and of a new one for each turn over one store.

An answer parts at its first token that is not plain's; what follows is not compared. The gap is that of the two best
logits of plain at that token, in standard deviations of its logits. Greedy decoding. Costs are in seconds that the
only thread was computing, so that other work on the machine is not counted, median of 3.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from record import Record, add_options
from reuse import measured_on, provenance
from targets import Result
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from kvboost_hf.assets import texts
from recipes.real_model import FLOAT32, fetch

TURNS, ANSWER, PASSAGE = 8, 12, 110  # tokens, the last two
FEW = 2  # chats in which each prompt is also computed whole in other ways
PLAIN, BY_HAND, LIVE, STORE = "plain", "by hand", "live", "store"
PIECES, ROWS, FIXED = "prefill_chunk_size=64", "two equal rows", "reproducible, nothing stored"
QUESTIONS = (
    "What is this text about?",
    "Which word in it is the most important one?",
    "Explain the first sentence to a child.",
    "What would an expert add?",
    "Is anything in it surprising?",
    "Give me an example.",
    "Are you sure?",
    "How would you say that in fewer words?",
    "What should I read next?",
    "Why does that matter?",
    "Who would need this?",
    "What is the opposite of that?",
)
Answer = tuple[list[int], torch.Tensor]  # tokens, and the logits [tokens, vocab_size] that they were chosen by


@dataclass
class Count:
    """How answers of one way compare with those of plain generate()."""

    turns: int = 0
    parted: int = 0
    tokens: int = 0  # that were compared
    gaps: list[float] = field(default_factory=list)  # where answers part
    all_gaps: list[float] = field(default_factory=list)  # of plain, at all tokens compared
    other_bits: int = 0  # turns whose first logits are not the same bit by bit

    def add(self, plain: Answer, other: Answer) -> None:
        self.turns += 1
        self.other_bits += not torch.equal(plain[1][0], other[1][0])
        for at, (ours, theirs) in enumerate(zip(other[0], plain[0], strict=False)):
            self.tokens += 1
            self.all_gaps.append(gap(plain[1][at]))
            if ours != theirs:
                self.parted += 1
                self.gaps.append(self.all_gaps[-1])
                return

    def row(self) -> Result:
        return {
            "turns": self.turns,
            "parted": self.parted,
            "tokens": self.tokens,
            "gaps": [round(each, 4) for each in sorted(self.gaps)],
            "median_gap": statistics.median(self.all_gaps or [0.0]),
            "other_bits": self.other_bits,
        }


def gap(logits: torch.Tensor) -> float:
    """Of the two best of [vocab_size], in standard deviations."""
    best, second = logits.float().topk(2).values.tolist()
    return (best - second) / float(logits.float().std())


class Chats:
    """Chats with one model.

    Args:
        model: The model.
        tokenizer: The tokenizer of the model.
        passages: The passages of real text.
    """

    def __init__(self, model: Any, tokenizer: Any, passages: list[str]) -> None:
        self.model, self._tokenizer, self._passages = model, tokenizer, passages

    def answer(self, ids: torch.Tensor, cache: Any = None, rows: int = 1, **kwargs: Any) -> Answer:
        """The answer to ids [1, tokens], of the first of so many rows."""
        ids = ids.expand(rows, -1)
        found = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=ANSWER,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **kwargs,
        )
        return found.sequences[0, ids.shape[1] :].tolist(), torch.stack([each[0] for each in found.logits])

    def turns(self, number: int) -> Iterator[tuple[torch.Tensor, Answer]]:
        """The prompts [1, tokens] of a chat, each with plain's answer."""
        opening = f"Read this:\n\n{self._passages[number]}\n\n{QUESTIONS[0]}"
        messages = [{"role": "user", "content": opening}]
        for turn in range(TURNS):
            ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
            ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
            plain = self.answer(ids)
            yield ids, plain
            said = self._tokenizer.decode(plain[0], skip_special_tokens=True)
            asked = QUESTIONS[1 + (number + 5 * turn) % (len(QUESTIONS) - 1)]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": asked}]


class ByHand:
    """A stock cache that is cut by hand to what the next prompt begins with."""

    def __init__(self, chats: Chats) -> None:
        self._chats, self._cache, self._held = chats, DynamicCache(config=chats.model.config), torch.empty(0)

    def answer(self, ids: torch.Tensor) -> Answer:
        new, held = ids[0, :-1], self._held
        most = min(len(new), len(held))
        agreed = int((new[:most] == held[:most]).long().cumprod(0).sum())
        if agreed < len(held):
            self._cache.crop(agreed - len(held))
        found = self._chats.answer(ids, self._cache)
        self._held = torch.cat([ids[0], torch.tensor(found[0][:-1])])  # the last one was never given to the model
        assert self._cache.get_seq_length() == len(self._held)
        return found


def ours(chats: Chats, policy: ReusePolicy | None, *, kept: bool) -> Callable[[torch.Tensor], Answer]:
    """Answers over one store; by a cache that is kept, or by a new one for each prompt."""
    store = ChunkStore(chats.model)
    cache = ChunkReuseCache(chats.model, store, policy)
    return lambda ids: chats.answer(ids, cache if kept else ChunkReuseCache(chats.model, store, policy))


class Comparison:
    """What was found in one dtype, chat by chat.

    Args:
        chats: The chats.
    """

    def __init__(self, chats: Chats) -> None:
        self._chats, self._found = chats, {name: Count() for name in (BY_HAND, LIVE, STORE, PIECES)}
        self._bits = {"turns": 0, "reused": 0, "kept": 0, "store": 0, "tokens": 0, "forwarded": 0}

    def ask(self, number: int, *, whole: bool) -> None:
        """Let one more chat be answered in each way.

        Args:
            number: The number of the chat.
            whole: Also as one of two rows, and with `reproducible=True`, which compute each prompt whole.
        """
        chats, policy = self._chats, ReusePolicy(reproducible=True)
        ways: dict[str, Callable[[torch.Tensor], Answer]] = {
            BY_HAND: ByHand(chats).answer,
            LIVE: ours(chats, None, kept=True),
            STORE: ours(chats, None, kept=False),
            PIECES: lambda ids: chats.answer(ids, prefill_chunk_size=64),
        }
        if whole:
            ways[ROWS] = lambda ids: chats.answer(ids, rows=2)
        stored = ours(chats, policy, kept=False)
        cache = ChunkReuseCache(chats.model, ChunkStore(chats.model), policy)
        for ids, plain in chats.turns(number):
            for name, way in ways.items():
                self._found.setdefault(name, Count()).add(plain, way(ids))
            if whole:
                cold = chats.answer(ids, ChunkReuseCache(chats.model, ChunkStore(chats.model), policy))
                self._found.setdefault(FIXED, Count()).add(plain, cold)
                self._bits["turns"] += 1
                self._bits["kept"] += not same(cold, chats.answer(ids, cache))
                self._bits["reused"] += cache.report.reused_tokens > 0
                self._bits["tokens"] += ids.shape[1]
                self._bits["forwarded"] += cache.report.forwarded_tokens
                self._bits["store"] += not same(cold, stored(ids))
        print(", ".join(f"{name} {count.parted}/{count.turns}" for name, count in self._found.items()), flush=True)

    def row(self) -> Result:
        """All of it so far."""
        return {"ways": {name: count.row() for name, count in self._found.items()}, "bits": self._bits}


def same(one: Answer, other: Answer) -> bool:
    """Whether two answers have the same logits, bit by bit."""
    return torch.equal(one[1], other[1])


def costs(chats: Chats, ids: torch.Tensor, tokens: int, rounds: int) -> Result:
    """Seconds to the first token of a prompt, and of one that goes on from it by 100 tokens."""
    prompt, longer = ids[:, :tokens], ids[:, : tokens + 100]
    times: dict[str, list[float]] = {}

    def first_token(name: str, given: torch.Tensor, cache: Any) -> None:
        begin = time.thread_time()
        chats.model.generate(
            input_ids=given, attention_mask=torch.ones_like(given), past_key_values=cache, max_new_tokens=1
        )
        times.setdefault(name, []).append(time.thread_time() - begin)

    for _ in range(rounds):
        first_token(PLAIN, prompt, None)
        for name, policy in (("default", ReusePolicy()), ("reproducible", ReusePolicy(reproducible=True))):
            cache = ChunkReuseCache(chats.model, ChunkStore(chats.model), policy)
            first_token(f"{name}, cold", prompt, cache)
            first_token(f"{name}, 100 tokens more", longer, cache)
        first_token(f"{PLAIN}, 100 tokens more", longer, None)
    return {"tokens": tokens, "seconds": {name: statistics.median(each) for name, each in times.items()}}


def markdown(result: Result) -> str:
    """The tables."""
    lines = [
        f"SmolLM2-135M-Instruct; {measured_on(result['provenance'])}",
        "",
        "| dtype | way | turns | answers that part | tokens compared | largest gap there | median of all gaps |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for dtype, found in result["dtypes"].items():
        for name, row in found["ways"].items():
            share = f"{row['parted']} ({row['parted'] / row['turns']:.0%})"
            most = f"{row['gaps'][-1]:.3f}" if row["gaps"] else ""
            lines.append(
                f"| {dtype} | {name} | {row['turns']} | {share} | {row['tokens']} | {most} | {row['median_gap']:.2f} |"
            )
    lines += [
        "",
        "`ReusePolicy(reproducible=True)`: turns in which some logit has other bits than with nothing stored. Beside "
        "it the default: turns in which some logit of the first token has other bits than plain generate():",
        "",
        "| dtype | turns | of them reused | tokens computed | other bits, kept cache | other bits, store "
        "| default, other bits |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for dtype, found in result["dtypes"].items():
        bits, live = found["bits"], found["ways"][LIVE]
        lines.append(
            f"| {dtype} | {bits['turns']} | {bits['reused']} | {bits['forwarded'] / bits['tokens']:.0%} "
            f"| {bits['kept']} | {bits['store']} | {live['other_bits']} of {live['turns']} |"
        )
    return "\n".join(lines) + "\n"


def costs_markdown(result: Result) -> str:
    """The table of seconds to the first token."""
    lines = [f"SmolLM2-135M-Instruct, bfloat16, time to the first token; {measured_on(result['provenance'])}"]
    for row in result["costs"]:
        if row is result["costs"][0]:
            names = list(row["seconds"])
            lines += ["", f"| tokens | {' | '.join(names)} |", "| ---: |" + " ---: |" * len(names)]
        seconds = " | ".join(f"{each:.2f} s" for each in row["seconds"].values())
        lines.append(f"| {row['tokens']:,} | {seconds} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3)
    parser.add_argument("--chats", type=int, default=20, help="in bfloat16")
    parser.add_argument(
        "--others", type=int, default=1, help="chats in other dtypes; float16 takes a CPU several times as long"
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--costs", action="store_true", help="time prompts, and ask no chats")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    fetch()
    tokenizer = AutoTokenizer.from_pretrained(FLOAT32)
    base = AutoModelForCausalLM.from_pretrained(FLOAT32)
    base.generation_config.pad_token_id = tokenizer.eos_token_id

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    pairs = zip(texts.prose(PASSAGE, count), texts.source(PASSAGE, count), strict=False)
    passages = [passage for pair in pairs for passage in pair]
    if not 0 < max(options.chats, options.others) <= len(passages):
        parser.error(f"--chats and --others must be from 1 to {len(passages)}, the passages that there are")
    result: Result = {"provenance": provenance(sys.argv[1:], "half_precision.py")}
    if options.costs:
        result["costs"] = []
        record = Record("half-precision-cost-cpu", options, result, costs_markdown)
        long = tokenizer("\n\n".join(texts.prose(2000, count)[:2]), return_tensors="pt").input_ids
        half = Chats(base.bfloat16(), tokenizer, passages)
        for tokens in (400, 1400):
            record.measure(
                f"{tokens} tokens",
                lambda tokens=tokens: result["costs"].append(costs(half, long, tokens, options.rounds)),
            )
        record.show()
        return
    result["dtypes"] = {}
    record = Record("half-precision-cpu", options, result, markdown)
    compared: dict[str, Comparison] = {}
    for number in range(max(options.chats, options.others)):
        for dtype in options.dtypes if number < options.others else ["bfloat16"]:
            if dtype not in compared:
                compared[dtype] = Comparison(Chats(copy.deepcopy(base).to(getattr(torch, dtype)), tokenizer, passages))

            def ask(dtype: str = dtype, number: int = number) -> None:
                compared[dtype].ask(number, whole=number < FEW)
                result["dtypes"][dtype] = compared[dtype].row()

            record.measure(f"{dtype}, chat {number}", ask)
    record.show()


if __name__ == "__main__":
    main()
