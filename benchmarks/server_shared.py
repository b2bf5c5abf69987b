"""The engine of the server: eight requests that begin alike against one, and a short request behind a long prompt.

    python benchmarks/server_shared.py --out benchmarks/results [--device cuda] [--threads 1]

Times are from the submission of a request to the end of its answer, and to its first token, both on the host; medians
of `ROUNDS`, after an untimed round. Requests that run together share their first 1,000 tokens, which no request before
them had, and have 24 of their own; each answer has 32 tokens. The models are random Llamas of 6 layers, 256 wide.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from reuse import Result, make_model, measured_on, provenance

from kvboost_hf import ChunkStore
from kvboost_hf.assets import load_embedded
from kvboost_hf.server.jobs import Event, Finished, Job, Progress, SamplingOptions
from kvboost_hf.server.worker import ModelEngine

SHARED, OWN, NEW, TOGETHER = 1000, 24, 32, 8
LONG, SHORT, PIECE = 4096, 16, 256
ROUNDS = 7


class Answer:
    """Listens to a request."""

    def __init__(self, engine: ModelEngine, ids: list[int], new_tokens: int) -> None:
        self._ended, self.first_s, self._start = threading.Event(), 0.0, time.perf_counter()
        engine.submit(Job(ids=ids, options=SamplingOptions(max_tokens=new_tokens)), self._hear)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Progress) and not self.first_s:
            self.first_s = time.perf_counter() - self._start
        if isinstance(event, Finished):
            assert event.reason == "length", event
            self._ended.set()

    def wait(self) -> None:
        assert self._ended.wait(600)


def draw(count: int) -> list[int]:
    return [int(token) for token in torch.randint(1, 1000, (count,))]


def seconds(engine: ModelEngine, requests: int) -> float:
    shared = draw(SHARED)
    start = time.perf_counter()
    answers = [Answer(engine, shared + draw(OWN), NEW) for _ in range(requests)]
    for answer in answers:
        answer.wait()
    return time.perf_counter() - start


def behind(engine: ModelEngine) -> tuple[float, float]:
    """The time to the first token of a short request behind a long prompt, and the time of a piece of that."""
    before, start = engine.stats()["pieces"], time.perf_counter()
    long = Answer(engine, draw(LONG), 1)
    while engine.stats()["pieces"] == before:
        time.sleep(0.001)
    short = Answer(engine, draw(SHORT), 1)
    short.wait()
    assert engine.stats()["pieces"] - before < LONG / PIECE, "the long prompt was computed first"
    long.wait()
    return short.first_s, (time.perf_counter() - start) / (LONG / PIECE)


def make_engine(device: str, attention: str, kv_heads: int) -> ModelEngine:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
    tokenizer = load_embedded()[1]
    model = make_model(device, **sizes, num_key_value_heads=kv_heads, vocab_size=len(tokenizer))
    model.set_attn_implementation(attention)
    return ModelEngine(model, tokenizer, store=ChunkStore(model), prefill_chunk_size=PIECE)


def run(device: str) -> list[dict[str, Any]]:
    found = []
    for kv_heads in (4, 2):
        for attention in ("sdpa", "kvboost_fa2"):
            engine = make_engine(device, attention, kv_heads)
            times: dict[int, list[float]] = {1: [], TOGETHER: []}
            waits = []
            for n in range(-1, ROUNDS):
                for requests, so_far in times.items():
                    took = seconds(engine, requests)
                    if n >= 0:
                        so_far.append(took)
                wait = behind(engine)
                if n >= 0:
                    waits.append(wait)
            engine.close()
            one, together = (statistics.median(so_far) for so_far in times.values())
            first, piece = (statistics.median(each) for each in zip(*waits, strict=True))
            row = {"attention": attention, "kv_heads": kv_heads, "one_ms": 1e3 * one, "together_ms": 1e3 * together}
            found.append({**row, "first_ms": 1e3 * first, "piece_ms": 1e3 * piece})
            print(found[-1], file=sys.stderr, flush=True)
    return found


def markdown(result: Result) -> str:
    lines = [
        f"Random Llama, 6 layers of 256, 4 heads; {measured_on(result['provenance'])}",
        "",
        f"| attention | heads of keys | one request | {TOGETHER} that begin alike | ratio "
        f"| a piece of {PIECE} tokens of a prompt of {LONG:,} | first token of a short request behind it | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        ratios = row["together_ms"] / row["one_ms"], row["first_ms"] / row["piece_ms"]
        lines.append(
            f"| {row['attention']} | {row['kv_heads']} | {row['one_ms']:.0f} ms | {row['together_ms']:.0f} ms | "
            f"{ratios[0]:.2f} | {row['piece_ms']:.0f} ms | {row['first_ms']:.0f} ms | {ratios[1]:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    result = {"provenance": provenance(sys.argv[1:], "server_shared.py"), "rows": run(options.device)}
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"server-shared-{options.device}"
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
