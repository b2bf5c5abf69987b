"""What reuse costs the host: a model of 32 layers whose arithmetic takes no time.

    python benchmarks/host_time.py --out benchmarks/results

Beside a fast device the host decides how soon a token is there, and what it does grows with layers and chunks, not
with their width. Times are those that the thread was computing, the least of all rounds, with all arms of a comparison
in turn within one loop. What one more chunk costs is what `stored` takes longer for a long prompt than for a short
one, less what `live` takes longer: the median over the rounds. Every prompt of `--tokens` tokens ends with 8 that were
never seen. Operators are what PyTorch was asked for, and do not depend on the machine.

    forward     of the last 8 tokens over a `DynamicCache` that holds the rest
    stock       generate() with that cache
    live        generate() with a `ChunkReuseCache` that holds the rest
    stored      with a new one, filled from a store
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import write
from reuse import Ids, in_turn, prefilled
from shapes import make_model
from targets import Result, verdicts
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.bench.run import provenance

LAYERS, UNSEEN, STEPS, CHUNK = 32, 8, 16, 128
FEW = 2 * CHUNK  # tokens of the prompt that shows what each more chunk costs
SIZES: dict[str, Any] = {  # so small that computing takes no time; in place of those of `tiny`
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 131_072,
}
Arm = Callable[[], float]


class Operators(TorchDispatchMode):
    """Counts what PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Steps(BaseStreamer):
    """Notes the thread's time at each token."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.at.append(time.thread_time())

    def end(self) -> None:
        pass


def generate(model: PreTrainedModel, ids: list[int], cache: Any, steps: int = 1) -> list[float]:
    """ms to the first token, and for each one after."""
    prompt, streamer = torch.tensor([ids]), Steps()
    call: Any = model.generate
    start = time.thread_time()
    call(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=steps,
        past_key_values=cache,
        streamer=streamer,
    )
    first, *rest = streamer.at[1:]
    return [1000 * (b - a) for a, b in zip([start, first, *rest], [first, *rest], strict=False)]


def arms_of(model: PreTrainedModel, tokens: int) -> dict[str, Arm]:
    """ms to the first token, `tokens` of a prompt of which all but the last were seen."""
    fresh = Ids(tokens)
    shared = fresh(tokens - UNSEEN)
    held, store, kept = prefilled(model, shared), ChunkStore(model), ChunkReuseCache(model, ChunkStore(model))
    store.warm(shared)

    def forward() -> float:
        ids = torch.tensor([fresh(UNSEEN)])
        start = time.thread_time()
        with torch.no_grad():
            model(input_ids=ids, past_key_values=held, use_cache=True, logits_to_keep=1).logits.argmax().item()
        ms = 1000 * (time.thread_time() - start)
        held.crop(-UNSEEN)
        return ms

    def stock() -> float:
        ms = generate(model, shared + fresh(UNSEEN), held)[0]
        held.crop(-UNSEEN)
        return ms

    return {
        "forward": forward,
        "stock": stock,
        "live": lambda: generate(model, shared + fresh(UNSEEN), kept)[0],
        "stored": lambda: generate(model, shared + fresh(UNSEEN), ChunkReuseCache(model, store))[0],
    }


def measure(arms: dict[str, Arm], rounds: int) -> dict[str, list[float]]:
    """ms of each arm in each round."""
    return in_turn({name: lambda _, arm=arm: arm() for name, arm in arms.items()}, rounds)


def least(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: min(values) for name, values in times.items()}


def operators(model: PreTrainedModel, arms: dict[str, Arm]) -> dict[str, float]:
    """Of each arm, per layer of the model."""
    found = {}
    for name, arm in arms.items():
        with Operators() as counted:
            arm()
        found[name] = counted.count / model.config.num_hidden_layers
    return found


def first_tokens(model: PreTrainedModel, tokens: int, rounds: int) -> Result:
    arms = arms_of(model, tokens)
    # Both prompts end with a chunk: with another length, `live` keeps a tail before the next first token.
    few = {f"{name}, few": arm for name, arm in arms_of(model, FEW).items() if name in ("live", "stored")}
    times = measure({**arms, **few}, rounds)
    names = ("stored", "stored, few", "live", "live, few")
    more = median(a - b - (c - d) for a, b, c, d in zip(*(times[name] for name in names), strict=True))
    per_chunk = 1000 * more / ((tokens - FEW) // CHUNK) / LAYERS
    return {"ms": least(times), "us_per_chunk_and_layer": per_chunk, "operators": operators(model, arms)}


def caches_of(model: PreTrainedModel, ids: list[int]) -> dict[str, Callable[[], Any]]:
    """What makes the cache of a prompt that was seen before."""
    store, kept = ChunkStore(model), ChunkReuseCache(model, ChunkStore(model))
    store.warm(ids)
    return {
        "stock": lambda: DynamicCache(config=model.config),
        "live": lambda: kept,
        "stored": lambda: ChunkReuseCache(model, store),
    }


def next_tokens(model: PreTrainedModel, tokens: int, rounds: int) -> dict[str, float]:
    """ms for each token after the second."""
    ids = Ids(tokens)(tokens)

    def step(make: Callable[[], Any]) -> float:
        times = generate(model, ids, make(), STEPS)[2:]
        return sorted(times)[len(times) // 2]

    made = caches_of(model, ids)
    return least(measure({name: lambda make=make: step(make) for name, make in made.items()}, rounds))


def next_operators(model: PreTrainedModel, tokens: int) -> dict[str, float]:
    """For each token after the second, per layer of the model."""
    ids, found = Ids(tokens)(tokens), {}
    for name, make in caches_of(model, ids).items():
        counts = []
        for steps in (2, 4):
            for _ in range(2):  # the model is probed, and a cache that is kept has answered as many tokens before
                generate(model, ids, make(), steps)
            cache = make()
            with Operators() as counted:
                generate(model, ids, cache, steps)
            counts.append(counted.count)
        found[name] = (counts[1] - counts[0]) / 2 / model.config.num_hidden_layers
    return found


def markdown(result: Result) -> str:
    lines = [
        f"{LAYERS} layers of width 32, {result['tokens']} tokens; {result['provenance']}",
        "",
        "| first token | forward | stock | live | stored |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    ways = ("forward", "stock", "live", "stored")
    for row in result["first"]:
        times = " | ".join(f"{row['ms'][arm]:.1f} ms" for arm in ways)
        counts = " | ".join(f"{row['operators'][arm]:.1f}" for arm in ways)
        lines += [f"| {row['attention']} | {times} |", f"| {row['attention']}, operators for each layer | {counts} |"]
    lines += ["", "| next tokens | stock | live | stored |", "| --- | ---: | ---: | ---: |"]
    for row in result["next"]:
        times = " | ".join(f"{row['ms'][arm]:.1f} ms" for arm in ways[1:])
        counts = " | ".join(f"{row['operators'][arm]:.1f}" for arm in ways[1:])
        lines += [f"| {row['attention']} | {times} |", f"| {row['attention']}, operators for each layer | {counts} |"]
    lines += ["", "| target | found | at most | |", "| --- | ---: | ---: | --- |"]
    for verdict in verdicts("host_time", result):
        target = verdict.target
        against = f", against {target.base}" if target.base else ""
        reached = "reached" if verdict.reached else "missed"
        lines.append(f"| {target.case}{against} | {verdict.found:.2f} | {target.most} | {reached} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--tokens", type=int, default=2048, help=f"a multiple of {CHUNK}, more than {FEW}")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if options.tokens % CHUNK or options.tokens <= FEW:
        parser.error(f"`--tokens` must be a multiple of {CHUNK}, more than {FEW}, got {options.tokens}.")
    torch.set_num_threads(1)
    model = make_model("cpu", "tiny", **SIZES)
    result: Result = {"tokens": options.tokens, "first": [], "next": []}
    result["provenance"] = str(provenance(f"`python benchmarks/host_time.py {' '.join(sys.argv[1:])}`", "cpu"))
    for attention in ("sdpa", "kvboost_fa2"):
        model.set_attn_implementation(attention)
        result["first"].append({"attention": attention, **first_tokens(model, options.tokens, options.rounds)})
        found = next_tokens(model, options.tokens, options.rounds)
        counted = next_operators(model, options.tokens)
        result["next"].append({"attention": attention, "ms": found, "operators": counted})
    write(options.out, "host_time", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
