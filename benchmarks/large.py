"""Reuse on a model of the shape of Llama 3.1 8B, in bfloat16, made on the device: first tokens, and each one after.

    python benchmarks/large.py --device cuda --out benchmarks/results [--shape 8b] [--minutes 9]

All arms of a comparison run in turn within one loop; figures are medians. The time to the first token is that from the
call of generate() to the token on the host, storing and filling included; each timed prompt has an ending that was
never seen before, and `cold` prompts meet an empty store. One untimed round of every arm comes first. `floor` is one
forward of the ending over a `DynamicCache` that holds the rest, cropped afterwards: what nobody can beat without
another kernel. `stored` is a new cache each time, filled from host memory. `static cache` is transformers' own, whose
decoding it compiles on a GPU, as `max_cache_len` compiles ours. Two rows that hit read what is stored in `pieces`,
where the attention can.

Skips of CUDA graphs are those that PyTorch's inductor counts. Launches, copies and waits of a token are from
`torch.profiler`, as the difference between an answer of 9 tokens and one of 1.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from record import Record, add_options, add_shape
from reuse import Ids, floor, in_turn, measured_on, medians, prefilled, provenance, rounded, ttft
from shapes import SHAPES, Shape, make_model
from targets import Result, verdicts
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf import ChunkReuseCache
from kvboost_hf.demo.timing import timed_generate

UNSEEN, STEPS = 128, 32
FIRST = ("plain", "cold", "floor", "live", "stored")
NEXT = (
    *("DynamicCache", "live", "stored", "static cache", "max_cache_len", "graph_skips"),
    *("DynamicCache, 2 rows", "pieces, 2 rows"),
)
LAUNCHES = ("DynamicCache", "live", "stored", "max_cache_len")
COUNTED = {
    "launches": ("LaunchKernel", "cuLaunch", "cudaGraphLaunch"),
    "copies": ("cudaMemcpyAsync",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}


def first_tokens(model: PreTrainedModel, shape: Shape, length: int, rounds: int) -> Result:
    """`length` tokens of which the last `UNSEEN` were never seen."""
    fresh = Ids(length)
    shared = fresh(length - UNSEEN)
    endings = {n: fresh(UNSEEN) for n in range(-1, rounds)}
    held = prefilled(model, shared)
    store = shape.new_store(model)
    store.warm(shared)
    kept = ChunkReuseCache(model, shape.new_store(model))

    def stored(n: int) -> float:
        cache = ChunkReuseCache(model, store)
        ms = ttft(model, shared + endings[n], past_key_values=cache)
        assert cache.report is not None
        assert cache.report.forwarded_tokens <= UNSEEN
        return ms

    def cold(n: int) -> float:
        return ttft(model, shared + endings[n], past_key_values=ChunkReuseCache(model, shape.new_store(model)))

    arms: dict[str, Callable[[int], float]] = {
        "plain": lambda n: ttft(model, shared + endings[n]),
        "cold": cold,
        "floor": lambda n: floor(model, held, endings[n]),
        "live": lambda n: ttft(model, shared + endings[n], past_key_values=kept),
        "stored": stored,
    }
    return medians(in_turn(arms, rounds))


def next_tokens(model: PreTrainedModel, shape: Shape, length: int, rounds: int) -> Result:
    """ms for each token after the first, `length` tokens held; and what inductor has left out of CUDA graphs."""
    ids = Ids(length)(length)
    held = prefilled(model, ids[:-1])
    store = shape.new_store(model)
    store.warm(ids)
    live = ChunkReuseCache(model, shape.new_store(model))
    ttft(model, ids, past_key_values=live)
    skips = 0

    def step(**kwargs: Any) -> float:
        call = timed_generate(model, ids, STEPS + 1, **kwargs)
        return (call.total_ms - call.ttft_ms) / STEPS

    def compiled() -> float:
        nonlocal skips
        before = counters["inductor"]["cudagraph_skips"]
        ms = step(past_key_values=static)
        skips += counters["inductor"]["cudagraph_skips"] - before
        return ms

    def rows_step(make: Callable[[], Any]) -> float:
        """Two rows with the same prompt."""
        times = []
        for steps in (1, STEPS + 1):
            cache, rows = make(), torch.tensor([ids, ids], device=model.device)
            begin = time.perf_counter()
            out = model.generate(
                input_ids=rows,
                attention_mask=torch.ones_like(rows),
                do_sample=False,
                max_new_tokens=steps,
                past_key_values=cache,
            )
            out[0, -1].item()
            times.append(1000 * (time.perf_counter() - begin))
        return (times[1] - times[0]) / STEPS

    arms: dict[str, Callable[[int], float]] = {
        "DynamicCache": lambda _: step(past_key_values=copy.deepcopy(held)),
        "live": lambda _: step(past_key_values=live),
        "stored": lambda _: step(past_key_values=ChunkReuseCache(model, store)),
    }
    static = ChunkReuseCache(model, store, max_cache_len=length + 2 * STEPS)
    arms["max_cache_len"] = lambda _: compiled()
    if model.config._attn_implementation == "sdpa":
        arms["static cache"] = lambda _: step(cache_implementation="static")
    else:
        both = prefilled(model, ids[:-1], rows=2)
        arms["DynamicCache, 2 rows"] = lambda _: rows_step(lambda: copy.deepcopy(both))
        arms["pieces, 2 rows"] = lambda _: rows_step(lambda: ChunkReuseCache(model, store))
    found = medians(in_turn(arms, rounds))
    return {**found, "graph_skips": skips}


def launches(model: PreTrainedModel, shape: Shape, length: int) -> Result:
    """Per token: kernels and graphs that are launched, copies, and waits for the device."""
    ids = Ids(length)(length)
    store = shape.new_store(model)
    store.warm(ids)
    live = ChunkReuseCache(model, store)
    static = ChunkReuseCache(model, store, max_cache_len=length + 2 * STEPS)
    for cache in (live, static):
        timed_generate(model, ids, STEPS + 1, past_key_values=cache)
    makers: dict[str, Callable[[], Any]] = {
        "DynamicCache": lambda: DynamicCache(config=model.config),
        "live": lambda: live,
        "stored": lambda: ChunkReuseCache(model, store),
        "max_cache_len": lambda: static,
    }
    on_gpu = model.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    found = {}
    for name, make in makers.items():
        counts = []
        for steps in (1, 9):
            cache = make()
            with profile(activities=activities) as profiled:
                timed_generate(model, ids, steps, past_key_values=cache)
                if on_gpu:
                    torch.cuda.synchronize()
            events = [event.name for event in profiled.events()]
            counts.append(
                [sum(any(each in event for each in names) for event in events) for names in COUNTED.values()]
            )
        found[name] = {name: round((b - a) / 8, 1) for name, a, b in zip(COUNTED, *counts, strict=True)}
    return found


def shown(value: float | int | None) -> str:
    """A time or a count, for a table."""
    return "" if value is None else f"{value:.1f} ms" if isinstance(value, float) else str(value)


def markdown(result: Result) -> str:
    lines = [
        f"{result['shape']}; {measured_on(result['provenance'])}",
        "",
        f"Prompts whose last {UNSEEN} tokens are new, and each of the {STEPS} tokens after the first.",
        "",
    ]
    for title, name, ways in (("first token", "first", FIRST), ("next tokens", "next", NEXT)):
        lines += [f"| {title} | {' | '.join(ways)} |", f"| --- |{' ---: |' * len(ways)}"]
        for row in result[name]:
            cells = [shown(row.get(way)) for way in ways]
            lines.append(f"| {row['attention']}, {row['tokens']} tokens | {' | '.join(cells)} |")
        lines.append("")
    lines += [
        f"| {', '.join(COUNTED)} for each token | {' | '.join(LAUNCHES)} |",
        "| --- |" + " ---: |" * len(LAUNCHES),
    ]
    for row in result["launches"]:
        cells = [" / ".join(f"{n:g}" for n in row.get(way, {}).values()) for way in LAUNCHES]
        lines.append(f"| {row['attention']}, {row['tokens']} tokens | {' | '.join(cells)} |")
    lines += ["", "| target | found | bound | |", "| --- | ---: | ---: | --- |"]
    for aim in verdicts("large", result):
        against = f", against {aim.base}" if aim.base else ""
        found = f"{aim.found:.2f}x" if aim.base else f"{aim.found:g}"
        lines.append(f"| {aim.case}{against} | {found} | {aim.bound} | {'reached' if aim.reached else 'missed'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3)
    add_shape(parser, "8b")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    model = make_model(options.device, options.shape)
    result: Result = {"provenance": provenance(sys.argv[1:], "large.py"), "shape": shape.describe()}
    result |= {"first": [], "next": [], "launches": []}
    record = Record(f"large-{options.device}", options, result, markdown)
    kinds: dict[str, Callable[[int], Result]] = {
        "first": lambda tokens: first_tokens(model, shape, tokens, options.rounds),
        "next": lambda tokens: next_tokens(model, shape, tokens, options.rounds),
        "launches": lambda tokens: launches(model, shape, tokens),
    }

    def measure(kind: str, attention: str, tokens: int) -> None:
        model.set_attn_implementation(attention)
        found = kinds[kind](tokens)
        result[kind].append({"attention": attention, "tokens": tokens, **found})
        print(rounded(found) if kind != "launches" else found)

    short, *_ = shape.prompts
    for attention in ("sdpa", "kvboost_fa2"):
        for kind, tokens in (*product(("first", "next"), shape.prompts), ("launches", short)):
            record.measure(f"{kind}, {attention}, {tokens}", partial(measure, kind, attention, tokens))
    record.show()


if __name__ == "__main__":
    main()
