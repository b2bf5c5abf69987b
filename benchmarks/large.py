"""Reuse on a model of the shape of Llama 3.1 8B, in bfloat16, made on the device: first tokens, and each one after.

    python benchmarks/large.py --device cuda --out benchmarks/results

All arms of a comparison run in turn within one loop; figures are medians. The time to the first token is that from the
call of generate() to the token on the host, storing and filling included; each timed prompt has an ending that was
never seen before, and `cold` prompts meet an empty store. One untimed round of every arm comes first. `floor` is one
forward of the ending over a `DynamicCache` that holds the rest, cropped afterwards: what nobody can beat without
another kernel. `stored` is a new cache each time, filled from host memory.
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reuse import Ids, floor, in_turn, medians, prefilled, rounded, ttft
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.bench.provenance import provenance
from kvboost_hf.demo.timing import timed_generate

UNSEEN, STEPS = 128, 32
COLD, LIVE, STORED, SETTLED = 1.05, 1.1, 1.4, 1.15  # at most, times a plain prompt, the floor, or a stock cache
Result = dict[str, Any]


def make_model(device: str, layers: int, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def new_store(model: PreTrainedModel) -> ChunkStore:
    return ChunkStore(model, max_bytes=16_000_000_000)


def first_tokens(model: PreTrainedModel, length: int, rounds: int) -> Result:
    """`length` tokens of which the last `UNSEEN` were never seen."""
    fresh = Ids(length)
    shared = fresh(length - UNSEEN)
    endings = {n: fresh(UNSEEN) for n in range(-1, rounds)}
    held = prefilled(model, shared)
    store = new_store(model)
    store.warm(shared)
    kept = ChunkReuseCache(model, new_store(model))

    def stored(n: int) -> float:
        cache = ChunkReuseCache(model, store)
        ms = ttft(model, shared + endings[n], past_key_values=cache)
        assert cache.report is not None
        assert cache.report.forwarded_tokens <= UNSEEN
        return ms

    arms: dict[str, Callable[[int], float]] = {
        "plain": lambda n: ttft(model, shared + endings[n]),
        "cold": lambda n: ttft(model, shared + endings[n], past_key_values=ChunkReuseCache(model, new_store(model))),
        "floor": lambda n: floor(model, held, endings[n]),
        "live": lambda n: ttft(model, shared + endings[n], past_key_values=kept),
        "stored": stored,
    }
    return medians(in_turn(arms, rounds))


def next_tokens(model: PreTrainedModel, length: int, rounds: int) -> Result:
    """ms for each token after the first, `length` tokens held."""
    ids = Ids(length)(length)
    held = prefilled(model, ids[:-1])
    store = new_store(model)
    store.warm(ids)
    live = ChunkReuseCache(model, new_store(model))
    ttft(model, ids, past_key_values=live)

    def step(cache: Any) -> float:
        call = timed_generate(model, ids, STEPS + 1, past_key_values=cache)
        return (call.total_ms - call.ttft_ms) / STEPS

    arms: dict[str, Callable[[int], float]] = {
        "DynamicCache": lambda _: step(copy.deepcopy(held)),
        "live": lambda _: step(live),
        "stored": lambda _: step(ChunkReuseCache(model, store)),
    }
    if model.config._attn_implementation == "sdpa":
        static = ChunkReuseCache(model, store, max_cache_len=length + 2 * STEPS)
        arms["max_cache_len"] = lambda _: step(static)
    return medians(in_turn(arms, rounds))


def launches(model: PreTrainedModel, length: int) -> Result:
    """Per token: kernels that are launched, copies, and waits for the device."""
    ids = Ids(length)(length)
    store = new_store(model)
    store.warm(ids)
    found = {}
    for name, make in (
        ("DynamicCache", lambda: DynamicCache(config=model.config)),
        ("stored", lambda: ChunkReuseCache(model, store)),
    ):
        counts = []
        for steps in (1, 9):
            cache = make()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                timed_generate(model, ids, steps, past_key_values=cache)
                torch.cuda.synchronize()
            events = [event.name for event in profiled.events()]
            counts.append(
                [
                    sum(any(each in event for each in names) for event in events)
                    for names in (
                        ("LaunchKernel", "cuLaunch"),
                        ("cudaMemcpyAsync",),
                        ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
                    )
                ]
            )
        found[name] = dict(
            zip(
                ("launches", "copies", "waits"),
                [round((b - a) / 8, 1) for a, b in zip(*counts, strict=True)],
                strict=True,
            )
        )
    return found


def judged(result: Result) -> list[Result]:
    """Each target with what was found."""
    found = []
    for name, targets in (
        ("first", (("cold", "plain", COLD), ("live", "floor", LIVE), ("stored", "floor", STORED))),
        ("next", tuple((arm, "DynamicCache", SETTLED) for arm in ("live", "stored", "max_cache_len"))),
    ):
        for row in result[name]:
            for arm, base, most in targets:
                if arm in row:
                    case = f"{name} token, {row['attention']}, {row['tokens']} held: {arm}"
                    found.append({"case": case, "base": base, "ms": row[arm], "base_ms": row[base], "most": most})
    return found


def verdicts(result: Result) -> list[str]:
    """One line for each target."""
    return [
        f"{'PASS' if each['ms'] <= each['most'] * each['base_ms'] else 'MISS'} {each['case']} "
        f"{each['ms'] / each['base_ms']:.2f}x {each['base']} ({each['ms']:.1f} and {each['base_ms']:.1f} ms), "
        f"at most {each['most']}x"
        for each in judged(result)
    ]


def markdown(result: Result) -> str:
    lines = [
        f"The shape of Llama 3.1 8B, bfloat16; {result['provenance']}",
        "",
        f"Prompts whose last {UNSEEN} tokens are new, and each of the {STEPS} tokens after the first.",
        "",
        "| first token | plain | cold | floor | live | stored |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["first"]:
        times = " | ".join(f"{row[arm]:.1f} ms" for arm in ("plain", "cold", "floor", "live", "stored"))
        lines.append(f"| {row['attention']}, {row['tokens']} tokens | {times} |")
    lines += [
        "",
        "| next tokens | DynamicCache | live | stored | max_cache_len |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in result["next"]:
        ways = ("DynamicCache", "live", "stored", "max_cache_len")
        times = " | ".join(f"{row[arm]:.1f} ms" if arm in row else "" for arm in ways)
        lines.append(f"| {row['attention']}, {row['tokens']} tokens | {times} |")
    lines += ["", "| launches, copies and waits for each token | DynamicCache | stored |", "| --- | ---: | ---: |"]
    for row in result["launches"]:
        counts = [" / ".join(f"{n:g}" for n in row[arm].values()) for arm in ("DynamicCache", "stored")]
        lines.append(f"| {row['attention']}, {row['tokens']} tokens | {' | '.join(counts)} |")
    lines += ["", "| target | found | at most | |", "| --- | ---: | ---: | --- |"]
    for each in judged(result):
        ratio = each["ms"] / each["base_ms"]
        verdict = "reached" if ratio <= each["most"] else "missed"
        lines.append(f"| {each['case']}, against {each['base']} | {ratio:.2f}x | {each['most']}x | {verdict} |")
    lines += ["", *(f"Failed: {each}" for each in result["failed"])] if result["failed"] else []
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32_768])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = make_model(options.device, options.layers, dtype)
    options.out.mkdir(parents=True, exist_ok=True)
    result: Result = {"first": [], "next": [], "launches": [], "failed": []}
    result["provenance"] = str(provenance(f"`python benchmarks/large.py {' '.join(sys.argv[1:])}`", options.device))
    for tokens in options.tokens:
        for attention in ("sdpa", "kvboost_fa2"):
            model.set_attn_implementation(attention)
            kind: dict[str, Callable[[], Result]] = {
                "first": lambda tokens=tokens: first_tokens(model, tokens, options.rounds),
                "next": lambda tokens=tokens: next_tokens(model, tokens, options.rounds),
            }
            if options.device == "cuda":
                kind["launches"] = lambda tokens=tokens: launches(model, tokens)
            for name, measure in kind.items():
                try:
                    found = measure()
                except Exception as error:  # the others are measured
                    result["failed"].append(f"{name}, {attention}, {tokens}: {type(error).__name__}: {error}"[:500])
                    print(result["failed"][-1], flush=True)
                    continue
                result[name].append({"attention": attention, "tokens": tokens, **found})
                print(f"{name}, {attention}, {tokens}: {rounded(found) if name != 'launches' else found}", flush=True)
                (options.out / f"large-{options.device}.json").write_text(json.dumps(result, indent=1) + "\n")
                (options.out / f"large-{options.device}.md").write_text(markdown(result))
    print("\n".join(verdicts(result)))


if __name__ == "__main__":
    main()
