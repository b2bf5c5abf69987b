"""What drafts without a draft model are worth on chats: text that is looked up in the prompt, and in a store.

    PYTHONPATH=. python benchmarks/speculation.py --model NAME --threads 2 --out benchmarks/results

A chat model is asked about real prose and source code (texts.py): to rewrite, to edit, to extract and to summarise,
which quote; and for what it cannot quote. It writes greedily, in each arm in turn: plainly, with `lookup_assistant`,
and with the prompt lookup of transformers. A round is a forward of the model in which a draft is checked. Times are
those behind the first round, so that the prompt is not in them; they are of one run.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from record import write
from reuse import measured_on
from targets import Result
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvboost_hf import ChunkReuseCache, ChunkStore, lookup_assistant
from kvboost_hf.assets.texts import prose, source

TEXT_TOKENS, NEW_TOKENS = 300, 64
QUOTING = {
    "rewrite prose": (prose, 'Write the text above again, with every "function" replaced by "procedure".'),
    "edit code": (source, "Write the code above again, with a comment above each function."),
    "extract": (prose, "List, word for word, the three most important sentences of the text above."),
    "summarise": (prose, "Summarise the text above in a few sentences."),
}
OTHERS = (
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain to a child why the sky is blue.",
    "Give me ten ideas for a birthday party in winter.",
)
ARMS = ("plain", "lookup_assistant", "transformers, 10 tokens")


@dataclass(frozen=True, slots=True)
class Chat:
    kind: str
    quotes: bool
    ids: torch.Tensor  # [1, tokens]


class Rounds(BaseStreamer):
    """The tokens of each round, and when they came."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # the first is that of the prompt
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.sizes.append(value.numel())
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@dataclass(slots=True)
class Run:
    """An answer by an arm."""

    new: int
    rounds: int
    proposed: int
    seconds: float  # behind the first round
    behind: int  # tokens behind the first round
    same: bool = True

    @property
    def accepted(self) -> int:
        return self.new - self.rounds


@dataclass(slots=True)
class Total:
    """All answers of an arm to chats of one kind."""

    runs: list[Run] = field(default_factory=list)

    def row(self) -> Result:
        new, rounds, proposed, accepted = (
            sum(getattr(run, name) for run in self.runs) for name in ("new", "rounds", "proposed", "accepted")
        )
        return {
            "answers": len(self.runs),
            "same": sum(run.same for run in self.runs),
            "tokens": new,
            "proposed": proposed,
            "accepted": accepted,
            "acceptance": accepted / proposed if proposed else None,
            "per_round": new / rounds,
            "tokens_per_second": sum(run.behind for run in self.runs) / sum(run.seconds for run in self.runs),
        }


def chats(tokenizer: Any, each: int) -> Iterator[Chat]:
    """So many chats of each kind that quotes, and those that do not."""

    def encoded(message: str) -> torch.Tensor:
        found = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids: torch.Tensor = found["input_ids"]
        return ids

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    for seed, (kind, (texts, asked)) in enumerate(QUOTING.items()):
        for text in texts(TEXT_TOKENS, count, seed)[:each]:
            yield Chat(kind, True, encoded(f"{text}\n\n{asked}"))
    for asked in OTHERS:
        yield Chat("other", False, encoded(asked))


@contextmanager
def columns(model: PreTrainedModel) -> Iterator[list[int]]:
    """The number of tokens of each forward within it."""
    found: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, args, out: found.append(out.shape[1]))
    try:
        yield found
    finally:
        hook.remove()


def answer(model: PreTrainedModel, chat: Chat, arm: str) -> tuple[list[int], Run]:
    """What an arm writes, and how."""
    settings: dict[str, Any] = {}
    if arm == "lookup_assistant":
        store = ChunkStore(model)
        settings = {
            "assistant_model": lookup_assistant(model, store),
            "past_key_values": ChunkReuseCache(model, store),
        }
    elif arm != "plain":
        settings = {"prompt_lookup_num_tokens": 10}
    streamer, generate = Rounds(), model.generate
    with columns(model) as widths:
        out: Any = generate(
            chat.ids,
            attention_mask=torch.ones_like(chat.ids),
            streamer=streamer,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            **settings,
        )
    prompt = chat.ids.shape[1]
    new = out[0, prompt:].tolist()
    assert sum(streamer.sizes) == out.shape[1], "the streamer got all of it"
    return new, Run(
        new=len(new),
        rounds=len(widths),
        proposed=sum(widths) - prompt - (len(widths) - 1),
        seconds=streamer.times[-1] - streamer.times[1],
        behind=sum(streamer.sizes[2:]),
    )


def measure_lookup(options: argparse.Namespace, where: Result) -> None:
    """Measure, and write `speculation-lookup`."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    totals: dict[str, dict[str, Total]] = {}
    for chat in chats(tokenizer, options.texts):
        expected: list[int] = []
        for arm in ARMS:
            new, run = answer(model, chat, arm)
            expected = expected or new
            run.same = new == expected
            totals.setdefault(chat.kind, {}).setdefault(arm, Total()).runs.append(run)
            print(f"{chat.kind}, {arm}: {run}", flush=True)
    kinds = {kind: {arm: total.row() for arm, total in arms.items()} for kind, arms in totals.items()}
    result = {"provenance": where, "text_tokens": TEXT_TOKENS, "new_tokens": NEW_TOKENS, "kinds": kinds}
    write(options.out, "speculation-lookup", result, markdown(result))
    print(markdown(result))


def markdown(result: Result) -> str:
    lines = [
        measured_on(result["provenance"]),
        "",
        f"Texts of at most {result['text_tokens']} tokens, answers of at most {result['new_tokens']}, float32. Speed "
        "is that behind the first round, over plain `generate()` in the same run; the machine had other work.",
        "",
        "| chats | arm | answers, as plain | accepted of proposed | tokens per forward | tokens/s | over plain |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, arms in result["kinds"].items():
        for arm, row in arms.items():
            of_plain = row["tokens_per_second"] / arms["plain"]["tokens_per_second"]
            share = f"{row['accepted']} of {row['proposed']} ({row['acceptance']:.0%})" if row["proposed"] else ""
            lines.append(
                f"| {kind} | {arm} | {row['answers']}, {row['same']} | {share} | {row['per_round']:.2f} "
                f"| {row['tokens_per_second']:.1f} | {of_plain:.2f}x |"
            )
    return "\n".join(lines) + "\n"
