"""Reuse on a model of the shape of Llama 3.1 8B, in bfloat16, made on the device: first tokens, and each one after.

    python benchmarks/large.py --device cuda --out benchmarks/results [--shape 8b] [--only first next] [--minutes 9]

All arms of a comparison run in turn within one loop; figures are medians. The time to the first token is that from the
call of generate() to the token on the host, storing and filling included; each timed prompt has an ending that was
never seen before, and `cold` prompts meet an empty store. One untimed round of every arm comes first. `floor` is one
forward of the ending over a `DynamicCache` that holds the rest, cropped afterwards: what nobody can beat without
another kernel. `stored` is a new cache each time, filled from host memory. `static cache` is transformers' own, whose
decoding it compiles on a GPU, as `max_cache_len` compiles ours; `DynamicCache, again` is beside them in their loop.
`live, in a graph` is a kept cache whose unseen tokens are computed in a CUDA graph, as a `compile_config` asks for.
Two rows that hit read what is stored in `pieces`, where the attention can. An arm that fails is named, and the others
go on.

Skips of CUDA graphs are those that PyTorch's inductor counts. Launches, copies and waits of a token, and how long the
device is busy with it, are from `torch.profiler`, as the difference between an answer of 9 tokens and one of 1. What
takes longest of a first token and of 9 tokens is in `large-DEVICE-profiles.md`.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import clock
import torch
from record import Record, add_options, add_shape, reason
from reuse import Ids, floor, in_turn, measured_on, medians, prefilled, provenance, rounded, ttft
from shapes import SHAPES, Shape, make_model
from targets import Result, verdicts
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers import CompileConfig, DynamicCache, PreTrainedModel

from kvboost_hf import ChunkReuseCache
from kvboost_hf.cache import costs
from kvboost_hf.cache.live.suffix_graph import BUCKETS
from kvboost_hf.verify.measure import timed_generate

UNSEEN, STEPS = 128, 32
FIRST = ("plain", "cold", "floor", "live", "stored", "floor, again", "live, in a graph", "suffix_skips")
NEXT = (
    *("DynamicCache", "live", "stored", "DynamicCache, again", "static cache", "max_cache_len", "graph_skips"),
    *("DynamicCache, 2 rows", "pieces, 2 rows"),
)
LAUNCHES = ("live", "DynamicCache", "stored", "max_cache_len")
PROFILED = 9  # tokens of an answer
TOP = 25  # operators of a profile
COUNTED = {
    "launches": ("LaunchKernel", "cuLaunch", "cudaGraphLaunch"),
    "copies": ("cudaMemcpyAsync",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}


def timed(arms: dict[str, Callable[[int], float]], rounds: int) -> Result:
    """The median of each arm, and why some have failed."""
    failed: dict[str, Exception] = {}
    found: Result = medians(in_turn(arms, rounds, failed))
    return found | ({"failed": {name: reason(error) for name, error in failed.items()}} if failed else {})


def step(model: PreTrainedModel, ids: list[int], **kwargs: Any) -> float:
    """ms for each token after the first."""
    call = timed_generate(model, ids, STEPS + 1, **kwargs)
    return (call.total_ms - call.ttft_ms) / STEPS


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
    return timed(arms, rounds)


def next_tokens(model: PreTrainedModel, shape: Shape, length: int, rounds: int) -> Result:
    """ms for each token after the first, `length` tokens held."""
    ids = Ids(length)(length)
    held = prefilled(model, ids[:-1])
    store = shape.new_store(model)
    store.warm(ids)
    live = ChunkReuseCache(model, shape.new_store(model))
    ttft(model, ids, past_key_values=live)
    arms: dict[str, Callable[[int], float]] = {
        "DynamicCache": lambda _: step(model, ids, past_key_values=copy.deepcopy(held)),
        "live": lambda _: step(model, ids, past_key_values=live),
        "stored": lambda _: step(model, ids, past_key_values=ChunkReuseCache(model, store)),
    }
    return timed(arms, rounds)


def graphs(model: PreTrainedModel, shape: Shape, length: int, rounds: int, peer: bool) -> Result:
    """The same in CUDA graphs, beside transformers' own if `peer` says so; and what inductor leaves out of graphs."""
    ids = Ids(length)(length)
    held = prefilled(model, ids[:-1])
    store = shape.new_store(model)
    store.warm(ids)
    static = ChunkReuseCache(model, store, max_cache_len=length + 2 * STEPS)
    skips = 0

    def compiled() -> float:
        nonlocal skips
        before = counters["inductor"]["cudagraph_skips"]
        ms = step(model, ids, past_key_values=static)
        skips += counters["inductor"]["cudagraph_skips"] - before
        return ms

    arms: dict[str, Callable[[int], float]] = {
        "DynamicCache, again": lambda _: step(model, ids, past_key_values=copy.deepcopy(held)),
        "max_cache_len": lambda _: compiled(),
    }
    if peer and model.config._attn_implementation == "sdpa":
        arms["static cache"] = lambda _: step(model, ids, cache_implementation="static")
    found = timed(arms, rounds)
    return {**found, "graph_skips": skips} if "max_cache_len" in found else found


def suffixes(model: PreTrainedModel, shape: Shape, length: int, rounds: int) -> Result:
    """First tokens of a kept cache whose unseen tokens run in a CUDA graph; and what inductor leaves out of graphs."""
    costs.PROMPTS_PER_GRAPH = 0  # at once
    fresh = Ids(length)
    shared = fresh(length - UNSEEN)
    held = prefilled(model, shared)
    cache = ChunkReuseCache(model, shape.new_store(model), max_cache_len=length + BUCKETS[-1])
    config = CompileConfig()
    before = counters["inductor"]["cudagraph_skips"]
    for _ in range(costs.CHECKED_STEPS + 2):  # compiled, recorded, and compared with eager ones
        ttft(model, shared + fresh(UNSEEN), past_key_values=cache, compile_config=config)
    endings = {n: fresh(UNSEEN) for n in range(-1, rounds)}

    def in_graph(n: int) -> float:
        ms = ttft(model, shared + endings[n], past_key_values=cache, compile_config=config)
        if (why := costs.CompileCosts.of(model).suffix_failure) is not None:
            raise RuntimeError(why)
        return ms

    found = timed({"floor, again": lambda n: floor(model, held, endings[n]), "live, in a graph": in_graph}, rounds)
    return {**found, "suffix_skips": counters["inductor"]["cudagraph_skips"] - before}


def two_rows(model: PreTrainedModel, shape: Shape, length: int, rounds: int) -> Result:
    """The same for two rows with one prompt, which read it in pieces."""
    ids = Ids(length)(length)
    store = shape.new_store(model)
    store.warm(ids)
    held = prefilled(model, ids[:-1], rows=2)

    def rows_step(make: Callable[[], Any]) -> float:
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
        "DynamicCache, 2 rows": lambda _: rows_step(lambda: copy.deepcopy(held)),
        "pieces, 2 rows": lambda _: rows_step(lambda: ChunkReuseCache(model, store)),
    }
    return timed(arms, rounds)


def launches(model: PreTrainedModel, shape: Shape, length: int, ways: Sequence[str], profiles: Result) -> Result:
    """Per token: kernels and graphs that are launched, copies, waits for the device, and ms that it is busy."""
    ids = Ids(length)(length)
    store = shape.new_store(model)
    store.warm(ids)
    live = ChunkReuseCache(model, store)
    static = ChunkReuseCache(model, store, max_cache_len=length + 2 * STEPS)
    makers: dict[str, Callable[[], Any]] = {
        "live": lambda: live,
        "DynamicCache": lambda: DynamicCache(config=model.config),
        "stored": lambda: ChunkReuseCache(model, store),
        "max_cache_len": lambda: static,
    }
    found: Result = {}
    for name in ways:
        timed_generate(model, ids, STEPS + 1, past_key_values=makers[name]())
        counts = []
        for steps in (1, PROFILED):
            profiled = profile_of(model, ids, steps, makers[name]())
            counts.append(counted(profiled))
            sort_by = "self_cuda_time_total" if model.device.type == "cuda" else "self_cpu_time_total"
            table = profiled.key_averages().table(sort_by=sort_by, row_limit=TOP, max_name_column_width=60)
            profiles[f"{model.config._attn_implementation}, {name}, {steps} tokens behind {length}"] = table
        found[name] = {key: round((counts[1][key] - counts[0][key]) / (PROFILED - 1), 2) for key in counts[0]}
        found[name]["first_busy_ms"] = round(counts[0]["busy_ms"], 2)
    return found


def profile_of(model: PreTrainedModel, ids: list[int], steps: int, cache: Any) -> Any:
    """A call of generate() under `torch.profiler`."""
    on_gpu = model.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiled:
        timed_generate(model, ids, steps, past_key_values=cache)
        clock.synchronize(model.device.type)
    return profiled


def counted(profiled: Any) -> dict[str, float]:
    """Calls of CUDA's functions by kind, and ms that the device was busy."""
    names = [event.name for event in profiled.events()]
    calls = {kind: sum(any(each in name for each in parts) for name in names) for kind, parts in COUNTED.items()}
    busy = sum(event.self_device_time_total for event in profiled.key_averages()) / 1000
    return {**calls, "busy_ms": busy}


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
        cells = [" / ".join(f"{n:g}" for key, n in row.get(way, {}).items() if key in COUNTED) for way in LAUNCHES]
        lines.append(f"| {row['attention']}, {row['tokens']} tokens | {' | '.join(cells)} |")
    lines += ["", "| target | found | bound | |", "| --- | ---: | ---: | --- |"]
    for aim in verdicts("large", result):
        against = f", against {aim.target.base}" if aim.target.base else ""
        found = f"{aim.found:.2f}x" if aim.target.base else f"{aim.found:g}"
        reached = "reached" if aim.reached else "missed"
        lines.append(f"| {aim.target.case}{against} | {found} | {aim.target.bound} | {reached} |")
    return "\n".join(lines) + "\n"


LENGTHS = ("short", "long")
KINDS = ("first", "suffixes", "next", "graphs", "rows", "launches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3)
    add_shape(parser, "8b")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="what is measured")
    parser.add_argument("--attentions", nargs="+", default=("sdpa", "kvboost_fa2"), help="of the model")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=LENGTHS, help="of prompts")
    parser.add_argument("--no-peer", action="store_true", help="leave out transformers' static cache")
    parser.add_argument("--ways", nargs="+", choices=LAUNCHES, default=LAUNCHES, help="whose launches are counted")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    model = make_model(options.device, options.shape)
    result: Result = {"provenance": provenance(sys.argv[1:], "large.py"), "shape": shape.describe()}
    result |= {"prompts": list(shape.prompts), "first": [], "next": [], "launches": []}
    record = Record(f"large-{options.device}", options, result, markdown)
    profiles: Result = {}

    def measure(kind: str, attention: str, tokens: int) -> None:
        model.set_attn_implementation(attention)
        found = by_kind(kind, tokens)
        for arm, why in found.pop("failed", {}).items():
            result["failed"].append(f"{kind}, {attention}, {tokens}: {arm}: {why}")
        place = result[{"suffixes": "first", "graphs": "next", "rows": "next"}.get(kind, kind)]
        row = next((row for row in place if (row["attention"], row["tokens"]) == (attention, tokens)), None)
        if row is None:
            place.append(row := {"attention": attention, "tokens": tokens})
        row.update(found)
        print(rounded(found) if kind != "launches" else found)

    def by_kind(kind: str, tokens: int) -> Result:
        given = model, shape, tokens
        if kind == "launches":
            found = launches(*given, options.ways, profiles)
            if options.out is not None:
                text = "\n\n".join(f"{name}\n\n{table}" for name, table in profiles.items())
                (options.out / f"large-{options.device}-profiles.md").write_text(text)
            return found
        if kind == "graphs":
            return graphs(*given, options.rounds, not options.no_peer)
        return {"first": first_tokens, "suffixes": suffixes, "next": next_tokens, "rows": two_rows}[kind](
            *given, options.rounds
        )

    lengths = {"short": shape.prompts[0], "long": shape.prompts[-1]}
    for attention in options.attentions:
        for kind in options.only:
            if kind == "rows" and attention == "sdpa":
                continue  # it reads no pieces
            chosen = dict.fromkeys(lengths[name] for name in options.lengths)
            for tokens in chosen if kind != "launches" else shape.prompts[:1]:
                record.measure(f"{kind}, {attention}, {tokens}", partial(measure, kind, attention, tokens))
    record.show()


if __name__ == "__main__":
    main()
