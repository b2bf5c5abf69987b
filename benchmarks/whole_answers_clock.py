"""Whole answers about moved documents at the ratios of a GPU: real calls of a small model, a virtual clock.

    python benchmarks/whole_answers_clock.py --out benchmarks/results

What each forward computes is counted in real `generate()` calls, and in those of the server's engine, of a model with
nine narrow layers. Time is that of Llama 3.1 8B in bfloat16: each layer takes what its weights and the K/V of all rows
take to be read, or its operations, whichever is longer. The rates are those of an H100: 85% of its 3.35 TB/s, and the
520 TFLOP/s that plain prompts reached there (benchmarks/results/large-cuda.md: 257 ms for 8,192 tokens, 1,382 ms for
32,768). What the JSON holds is not counted again. K/V comes from host memory at 55 GB/s, before the first forward. A
forward takes no less than the host needs to launch it: 24 ms without graphs, as measured there, or nothing. What
riding takes on the host is not counted.
"""

import argparse
import json
import logging
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from record import write
from shapes import make_model
from targets import Result
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from kvboost_hf.bench.run import provenance
from kvboost_hf.cache import costs
from kvboost_hf.cache.forward.idle import Idle
from kvboost_hf.server.engine.worker import ModelEngine
from kvboost_hf.server.generation.batch import BatchKV
from kvboost_hf.server.jobs import Finished, Job, SamplingOptions

NAME = "whole-answers-clock"
BYTES_PER_S, OPERATIONS_PER_S, LINK_PER_S = 0.85 * 3.35e12, 520e12, 55e9
LAYERS, WIDTH, KV_WIDTH, INTERMEDIATE, VOCABULARY = 32, 4096, 1024, 14_336, 128_256
PARAMETERS = 2 * WIDTH * WIDTH + 2 * WIDTH * KV_WIDTH + 3 * WIDTH * INTERMEDIATE  # of a layer
KV_BYTES = 2 * 2 * KV_WIDTH  # of a token in a layer
EAGER_S = 0.024
DOCUMENT, ANSWERS = 512, (24, 128)
RIDING = 0, 1, 4, 8  # of the answers in the server's batch
ROWS, BATCHED = 8, 4  # answers in the server's batch, and documents in each of their prompts
WAYS: dict[str, ReusePolicy | None] = {
    "plain": None,
    'the default, which rides (`progressive="ride"`)': ReusePolicy(mode="blend"),
    "repaired once (`progressive=False`)": ReusePolicy(mode="blend", progressive=False),
    "all before the second token (`progressive=True`)": ReusePolicy(mode="blend", progressive=True),
    '`repair="none"`, which rides': ReusePolicy(mode="blend", repair="none"),
}
Forwards = list[int]  # tokens of each, over all rows


def seconds(tokens: int, context: int, floor: float, rows: int = 1) -> float:
    """Seconds of a forward over so many tokens, which attend to `context` ones in each row."""
    seen = context / 2 if tokens >= rows * context else context
    read = (2 * PARAMETERS + KV_BYTES * rows * context) / BYTES_PER_S
    computed = tokens * (2 * PARAMETERS + 4 * seen * WIDTH) / OPERATIONS_PER_S
    return max(floor, LAYERS * max(read, computed) + 2 * VOCABULARY * WIDTH / BYTES_PER_S)


@contextmanager
def counted() -> Iterator[Forwards]:
    """The forwards of all threads."""
    found: Forwards = []
    look_up = torch.embedding

    def embedding(weight: torch.Tensor, ids: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        found.append(ids.numel())
        return look_up(weight, ids, *more, **named)

    with mock.patch.object(torch, "embedding", embedding):
        yield found


@contextmanager
def clocked(model: PreTrainedModel, floor: float) -> Iterator[None]:
    """Within it, the model measures its forwards by the virtual clock, and nothing is repaired while idle."""
    key = "free columns", model.dtype, torch.device("cpu")

    def forward_s(model: PreTrainedModel, tokens: int) -> float:
        return seconds(tokens, tokens, floor)

    with (
        mock.patch.object(costs, "weights_come_and_go", return_value=True),
        mock.patch.object(costs, "_seconds_of_forward", forward_s),
        mock.patch.object(costs, "remember", lambda model, asked, find: find() if asked == key else None),
        mock.patch.object(Idle, "begin"),
    ):
        yield


def documents(count: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(count)
    return [torch.randint(1, 1000, (1, DOCUMENT), generator=chance) for _ in range(count)]


def prompt(texts: list[torch.Tensor], seed: int) -> torch.Tensor:
    """The documents in an order of their own, between 32 and 64 new tokens."""
    chance = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(texts), generator=chance).tolist()
    head, tail = (torch.randint(1, 1000, (1, size), generator=chance) for size in (32, 64))
    return torch.cat([head, *(texts[i] for i in order), tail], dim=1)


def prime(model: PreTrainedModel, store: ChunkStore, texts: list[torch.Tensor]) -> None:
    """Have the store see each document, behind other tokens each."""
    for seed, text in enumerate(texts):
        cache = ChunkReuseCache(model, store)
        call: Any = model.generate
        call(prompt([text], 100 + seed)[:, :-64], cache=cache, max_new_tokens=1)
        cache.reset()


class Tokens:
    """A streamer that notes after how many forwards each token has come.

    Args:
        forwards: The number of forwards so far.
    """

    def __init__(self, forwards: Forwards) -> None:
        self._forwards, self.after = forwards, list[int]()

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, and then with each token."""
        self.after.append(len(self._forwards))

    def end(self) -> None:
        """Nothing: it is called after the last token."""


def answer(model: PreTrainedModel, store: ChunkStore, way: str, ids: torch.Tensor, floor: float) -> dict[str, Any]:
    """Tokens computed for answers of each length, and seconds by the clock."""
    policy, new = WAYS[way], ANSWERS[-1]
    if policy is None:
        forwards, after, loaded, moved = [ids.shape[1]] + [1] * (new - 1), list(range(new + 1)), 0, 0
    else:
        cache = ChunkReuseCache(model, store, policy)
        with counted() as forwards:
            tokens = Tokens(forwards)
            lengths: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            call: Any = model.generate
            call(ids, attention_mask=torch.ones_like(ids), cache=cache, streamer=tokens, **lengths)
        after, report = tokens.after, cache.report
        loaded, moved = report.tier_tokens.get("ram", 0), report.moved_tokens
    found: dict[str, Any] = {"loaded": loaded, "moved": moved}
    for length in ANSWERS:
        work = forwards[: after[length]]
        loading = loaded * LAYERS * KV_BYTES / LINK_PER_S
        time = loading + sum(seconds(tokens, ids.shape[1], floor) for tokens in work)
        found[str(length)] = {"tokens": sum(work), "forwards": len(work), "s": time}
    return found


def answers(model: PreTrainedModel, count: int, floor: float) -> dict[str, Any]:
    """Answers of each way to a prompt of so many documents."""
    texts, rows = documents(count), dict[str, Any]()
    asked = prompt(texts, 2)
    for way, policy in WAYS.items():
        store = ChunkStore(model, max_bytes=4 * 2**30)
        if policy is not None:
            prime(model, store, texts)
        rows[way] = answer(model, store, way, asked, floor)
        store.close()
    return {"tokens": asked.shape[1], "ways": rows}


def batch(model: PreTrainedModel, count: int, riding: int, floor: float) -> dict[str, Any]:
    """The engine's steps for 8 answers, of which some ride and the others have nothing moved."""
    texts = documents(count)
    ended = threading.Event()
    left = [ROWS]

    def listen(event: Any) -> None:
        if isinstance(event, Finished):
            left[0] -= 1
            if not left[0]:
                ended.set()

    options = SamplingOptions(max_tokens=ANSWERS[1], min_tokens=ANSWERS[1])
    policy = ReusePolicy(mode="blend")
    make: Any = PreTrainedTokenizerFast
    engine = ModelEngine(model, make(tokenizer_object=_tokenizer()), policy=policy, batch_window_ms=500)
    steps: list[tuple[int, int]] = []  # rows and tokens of each
    check = BatchKV.check

    def noted(kv: BatchKV, tokens: Any, again: Any = ()) -> torch.Tensor:
        with counted() as forwards:
            found = check(kv, tokens, again)
        steps.extend((len(kv.lengths), tokens) for tokens in forwards)
        return found

    try:
        prime(model, engine.store, texts)
        with mock.patch.object(BatchKV, "check", noted):
            for row in range(ROWS):
                ids = prompt(texts, 2 + row)[0].tolist()
                engine.submit(Job(ids=ids, options=options, reuse=None if row < riding else "exact"), listen)
            assert ended.wait(600)
    finally:
        engine.close()
        engine.store.close()
    context = count * DOCUMENT + 96
    times = [seconds(tokens, context, floor, rows) / seconds(rows, context, floor, rows) for rows, tokens in steps]
    more = [tokens // rows - 1 for rows, tokens in steps if tokens > rows]
    return {
        "riding": riding,
        "steps": len(steps),
        "with": len(more),
        "columns": statistics.median(more) if more else 0,
        "worst": max(times),
        "mean": statistics.mean(times),
    }


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({f"{i}": i for i in range(1024)}, unk_token="0"))


FLOORS = {"device alone": 0.0, "without graphs": EAGER_S}


def table(result: Result) -> str:
    lines = [
        "# Whole answers at the ratios of a GPU, by a virtual clock",
        "",
        f"Counted on a CPU; {result['provenance']}",
        "",
        "No GPU has run this. Documents of 512 tokens that were stored apart, between 96 new tokens of a prompt.",
        "Tokens and forwards are those of real calls of a small model; times are what Llama 3.1 8B in bfloat16 would",
        "take for them with 2.85 TB/s, 520 TFLOP/s and 55 GB/s from host memory: rates that plain prompts reached on",
        "an H100, or 85% of its data sheet's. `device alone`: the host is never waited for. `without graphs`: a",
        "forward takes 24 ms at least, as was measured there. What riding steps take on the host is not counted.",
    ]
    for floor, cases in result["answers"].items():
        lines += ["", f"## {floor}", ""]
        lines += ["| prompt | way | tokens computed, 24 | 128 | 24 tokens, over plain | 128 tokens, over plain |"]
        lines += ["| ---: | --- | ---: | ---: | ---: | ---: |"]
        for case in cases:
            plain = case["ways"]["plain"]
            for way, row in case["ways"].items():
                over = [f"{row[str(new)]['s'] / plain[str(new)]['s']:.2f}" for new in ANSWERS]
                again = " | ".join(f"{row[str(new)]['tokens']:,}" for new in ANSWERS)
                cells = [f"{plain[str(new)]['s']:.2f} s" for new in ANSWERS] if way == "plain" else over
                lines.append(f"| {case['tokens']:,} | {way} | {again} | {' | '.join(cells)} |")
    lines += ["", "## The server's batch: 8 answers of 128 tokens", ""]
    lines += ["Time between two tokens of each row over that without riding, by the clock of the device alone.", ""]
    lines += ["| prompts | rows that ride | steps | that repair | columns of a row | longest | mean |"]
    lines += ["| ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for tokens, rows in result["batches"].items():
        for row in rows:
            cells = [f"{int(row[name])}" for name in ("riding", "steps", "with", "columns")]
            cells += [f"{row[name]:.2f}" for name in ("worst", "mean")]
            lines.append(f"| {int(tokens):,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--documents", type=int, nargs="+", default=[16, 32])
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    narrow = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_model("cpu", "tiny", num_hidden_layers=9, max_position_embeddings=65_536, **narrow)
    path = options.out / f"{NAME}.json"
    result: Result = json.loads(path.read_text()) if path.exists() else {"answers": {}, "batches": {}}
    command = f"`python benchmarks/whole_answers_clock.py {' '.join(sys.argv[1:])}`"
    result["provenance"] = str(provenance(command, "cpu"))
    for name, floor in FLOORS.items():
        cases = result["answers"].setdefault(name, [])
        with clocked(model, floor):
            answers(model, 2, floor)  # the model is probed once
            for count in options.documents[len(cases) :]:
                cases.append(answers(model, count, floor))
                write(options.out, NAME, result, table(result))
    rows = result["batches"].setdefault(str(BATCHED * DOCUMENT), [])
    with clocked(model, 0.0):
        for riding in RIDING[len(rows) :]:
            rows.append(batch(model, BATCHED, riding, 0.0))
            write(options.out, NAME, result, table(result))
    print(table(result))


if __name__ == "__main__":
    main()
