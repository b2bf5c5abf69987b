"""The engine of the server: eight requests that begin alike against one, and a short request behind a long prompt.

    python benchmarks/server_shared.py --out benchmarks/results [--device cuda] [--shape 8b] [--threads 1]

Times are from the submission of a request to the end of its answer, and to its first token, both on the host; medians
of all rounds, after an untimed one. Requests that run together share their first 1,000 tokens, which no request before
them had, and have 24 of their own; each answer has 32 tokens. The models are random Llamas of 6 layers, 256 wide.

With another shape the models are those of `shapes.py`, and requests share all but 24 tokens of its prompts; and
transformers' continuous batching answers as many, which share the pages of a common prefix, too.
"""

import argparse
import statistics
import sys
import threading
import time
from functools import partial
from typing import Any

import torch
from record import Record, add_options, add_shape
from reuse import measured_on, provenance
from shapes import SHAPES, make_model
from targets import Result
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from kvboost_hf.assets import load_embedded
from kvboost_hf.server.engine.worker import ModelEngine
from kvboost_hf.server.jobs import Finished, Job, JobEvent, Progress, SamplingOptions

OWN, NEW, TOGETHER = 24, 32, 8
PIECE, LONG = 256, 4096  # tokens: of a piece of a prompt, and of a prompt that others wait behind, at least
WAIT_S = 600
PAGE = 256  # tokens of a page of continuous batching


class Answer:
    """Listens to a request."""

    def __init__(self, engine: ModelEngine, ids: list[int], new_tokens: int) -> None:
        self._ended, self.first_s, self._start = threading.Event(), 0.0, time.perf_counter()
        self._reason: str | None = None
        self.ids: tuple[int, ...] = ()
        engine.submit(Job(ids=ids, options=SamplingOptions(max_tokens=new_tokens)), self._hear)

    def _hear(self, event: JobEvent) -> None:
        if isinstance(event, Progress) and not self.first_s:
            self.first_s = time.perf_counter() - self._start
        if isinstance(event, Finished):
            self._reason, self.ids = event.reason, tuple(event.ids)
            self._ended.set()

    def wait(self) -> None:
        assert self._ended.wait(WAIT_S)
        assert self._reason == "length", self._reason


def draw(count: int) -> list[int]:
    return [int(token) for token in torch.randint(1, 1000, (count,))]


def seconds(engine: ModelEngine, shared: int, requests: int) -> float:
    first = draw(shared)
    start = time.perf_counter()
    answers = [Answer(engine, first + draw(OWN), NEW) for _ in range(requests)]
    for answer in answers:
        answer.wait()
    return time.perf_counter() - start


def behind(engine: ModelEngine, tokens: int) -> tuple[float, float]:
    """The time to the first token of a short request behind a long prompt, and the time of a piece of that."""
    before, start = engine.stats()["pieces"], time.perf_counter()
    long = Answer(engine, draw(tokens), 1)
    while engine.stats()["pieces"] == before:
        time.sleep(0.001)
    short = Answer(engine, draw(PIECE // 16), 1)
    short.wait()
    assert engine.stats()["pieces"] - before < tokens / PIECE, "the long prompt was computed first"
    long.wait()
    return short.first_s, (time.perf_counter() - start) / (tokens / PIECE)


def make(options: argparse.Namespace, kv_heads: int) -> PreTrainedModel:
    sizes: dict[str, Any] = {"num_key_value_heads": kv_heads, "vocab_size": len(load_embedded()[1])}
    if options.shape == "small":
        sizes |= {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
    return make_model(options.device, options.shape, **sizes)


def together(options: argparse.Namespace, attention: str, kv_heads: int, tokens: int, long: int) -> Result:
    """One request, eight that share all but the last tokens of a prompt, and one behind a long prompt."""
    model = make(options, kv_heads)
    model.set_attn_implementation(attention)
    store = SHAPES[options.shape].new_store(model)
    engine = ModelEngine(model, load_embedded()[1], store=store, prefill_chunk_size=PIECE)
    times: dict[int, list[float]] = {1: [], TOGETHER: []}
    waits = []
    try:
        for n in range(-1, options.rounds):
            for requests, so_far in times.items():
                took = seconds(engine, tokens - OWN, requests)
                if n >= 0:
                    so_far.append(took)
            wait = behind(engine, long)
            if n >= 0:
                waits.append(wait)
    finally:
        engine.close()
    one, all_of_them = (statistics.median(so_far) for so_far in times.values())
    first, piece = (statistics.median(each) for each in zip(*waits, strict=True))
    row = {"attention": attention, "kv_heads": kv_heads, "tokens": tokens, "together": TOGETHER, "one_ms": 1e3 * one}
    return {**row, "together_ms": 1e3 * all_of_them, "long": long, "first_ms": 1e3 * first, "piece_ms": 1e3 * piece}


def continuous_batching(options: argparse.Namespace, kv_heads: int, tokens: int) -> float:
    """Milliseconds of transformers' own for as many requests."""
    model: Any = make(options, kv_heads)
    model.set_attn_implementation("sdpa")
    pages = TOGETHER * (-(-(tokens + NEW) // PAGE) + 1)
    room = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=2048)
    manager = model.init_continuous_batching(GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0), room)
    manager.start()
    times = []
    try:
        for n in range(-1, options.rounds):
            shared = draw(tokens - OWN)
            start = time.perf_counter()
            manager.add_requests([shared + draw(OWN) for _ in range(TOGETHER)], max_new_tokens=NEW)
            for _ in range(TOGETHER):
                answer = manager.get_result(timeout=WAIT_S)
                assert answer is not None
                assert len(answer.generated_tokens) == NEW, answer.error
            if n >= 0:
                times.append(time.perf_counter() - start)
    finally:
        manager.stop(block=True)
    return 1e3 * statistics.median(times)


def markdown(result: Result) -> str:
    lines = [
        f"{result['shape']}; {measured_on(result['provenance'])}",
        "",
        f"| attention | heads of keys | tokens | one request | {TOGETHER} that begin alike | ratio "
        f"| continuous batching, {TOGETHER} | a piece of {PIECE} tokens of a longer prompt "
        "| first token of a short request behind it | ratio |",
        "| --- |" + " ---: |" * 9,
    ]
    for row in result["rows"]:
        ratios = row["together_ms"] / row["one_ms"], row["first_ms"] / row["piece_ms"]
        batching = f"{row['batching_ms']:.0f} ms" if "batching_ms" in row else ""
        lines.append(
            f"| {row['attention']} | {row['kv_heads']} | {row['tokens']} | {row['one_ms']:.0f} ms "
            f"| {row['together_ms']:.0f} ms | {ratios[0]:.2f} | {batching} | {row['piece_ms']:.0f} ms "
            f"| {row['first_ms']:.0f} ms | {ratios[1]:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=7)
    add_shape(parser, "small")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = SHAPES[options.shape]
    small = options.shape == "small"
    described = "random Llama, 6 layers of 256, 4 heads" if small else shape.describe()
    result: Result = {"provenance": provenance(sys.argv[1:], "server_shared.py"), "shape": described, "rows": []}
    record = Record(f"server-shared-{options.device}", options, result, markdown)

    def measure(attention: str, kv_heads: int, tokens: int) -> None:
        result["rows"].append(together(options, attention, kv_heads, tokens, max(LONG, tokens)))
        print({name: round(value) for name, value in result["rows"][-1].items() if name.endswith("ms")})

    def compare(kv_heads: int, tokens: int) -> None:
        took = continuous_batching(options, kv_heads, tokens)
        for row in result["rows"]:
            if row["tokens"] == tokens:
                row["batching_ms"] = took

    for tokens in (1000 + OWN,) if small else shape.prompts:
        for kv_heads in (4, 2) if small else (shape.sizes["num_key_value_heads"],):
            for attention in ("sdpa", "kvboost_fa2"):
                case = f"{attention}, {kv_heads} heads of keys, {tokens} tokens"
                record.measure(case, partial(measure, attention, kv_heads, tokens))
            if not small:
                record.measure(f"continuous batching, {tokens} tokens", partial(compare, kv_heads, tokens))
    record.show()


if __name__ == "__main__":
    main()
