"""Models with `kvboost_fa2` against the same models with `sdpa`, in generate().

    python benchmarks/attention_models.py --out benchmarks/results [--device cuda] [--shape 8b]

Two models with the same weights, one for each attention, take turns; figures are medians, and ratios are within the
run. Times to the first token are those of `reuse.py`: from the call to the token on the host. Decoding is the time
from the first token to the last, by token. One untimed round of every arm comes first.

The models are those of `shapes.py`, with heads of which 4 share one of keys (`grouped`), or have one each.
"""

import argparse
import sys
from collections.abc import Callable

from record import Record, add_options, add_shape
from reuse import Ids, in_turn, measured_on, medians, provenance
from shapes import SHAPES, Shape, make_model
from targets import Result
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, KVQuantConfig, ReusePolicy
from kvboost_hf.attention import active_tier
from kvboost_hf.verify.measure import timed_generate

ATTENTIONS = ("sdpa", "kvboost_fa2")
DECODED = 24
HEADS = {"grouped": 4, "one each": 1}  # that share one of keys


def first_token(model: PreTrainedModel, ids: list[int], cache: ChunkReuseCache | None = None) -> float:
    """Milliseconds."""
    return timed_generate(model, ids, 1, past_key_values=cache).ttft_ms


def each_token(model: PreTrainedModel, ids: list[int], cache: ChunkReuseCache | None = None) -> float:
    """Milliseconds for each decoded token after the first."""
    call = timed_generate(model, ids, DECODED + 1, past_key_values=cache)
    return (call.total_ms - call.ttft_ms) / DECODED


def compare(models: dict[str, PreTrainedModel], arm: Callable[[PreTrainedModel, int], float], rounds: int) -> Result:
    """An arm with each attention, in turn."""
    arms = {name: lambda n, model=model: arm(model, n) for name, model in models.items()}
    found = medians(in_turn(arms, rounds))
    return {**found, "ratio": found["sdpa"] / found["kvboost_fa2"]}


def cases(models: dict[str, PreTrainedModel], shape: Shape, rounds: int, record: Record, heads: str) -> None:
    """All that is measured of a pair of models."""
    fresh, found = Ids(1), record.result["models"].setdefault(heads, {})

    def note(name: str, arm: Callable[[PreTrainedModel, int], float], rounds: int = rounds) -> None:
        record.measure(f"{heads}, {name}", lambda: found.update({name: compare(models, arm, rounds)}))

    long = fresh(8192)
    endings = {unseen: {n: fresh(unseen) for n in range(-1, rounds)} for unseen in (8, 200)}
    prompts = {n: fresh(2000) for n in range(-1, rounds)}
    parts = [fresh(512) for _ in range(6)]
    orders = {n: [parts[(at + 1 + n) % 6] for at in (3, 0, 5, 2, 4, 1)] for n in range(-1, rounds)}
    stores = {id(model): shape.new_store(model) for model in models.values()}
    kept = {id(model): ChunkReuseCache(model, shape.new_store(model)) for model in models.values()}
    blend = ReusePolicy(mode="blend", repair="first_k")

    def from_store(model: PreTrainedModel, seen: list[int], more: list[int]) -> float:
        stores[id(model)].warm(seen)
        return first_token(model, seen + more, ChunkReuseCache(model, stores[id(model)]))

    def moved(model: PreTrainedModel, n: int) -> float:
        store = shape.new_store(model)
        store.warm([token for part in parts for token in part])
        ids = [token for part in orders[n] for token in part] + endings[8][n]
        return first_token(model, ids, ChunkReuseCache(model, store, blend))

    note("whole prompt of 2,000 tokens", lambda model, n: first_token(model, prompts[n]))
    for unseen in (8, 200):
        for seen in (1800, 8192):
            note(
                f"{seen:,} tokens from the store, {unseen} unseen",
                lambda model, n, seen=seen, unseen=unseen: from_store(model, long[:seen], endings[unseen][n]),
            )
    note(
        "8,192 tokens in the live cache, 200 unseen",
        lambda model, n: first_token(model, long + endings[200][n], kept[id(model)]),
    )
    note("3,072 tokens moved, 15% repaired (first_k)", moved)
    for seen in (512, 8192):
        note(
            f"each token after {seen:,}",
            lambda model, n, seen=seen: each_token(model, long[:seen], ChunkReuseCache(model, stores[id(model)])),
            max(3, rounds // 2),
        )
    for name, config in {
        "int8": KVQuantConfig(method="kivi", key_bits=8, value_bits=8),
        "TurboQuant, 4 bits": KVQuantConfig(),
    }.items():
        note(
            f"each token after 8,192 as codes, {name}",
            lambda model, n, config=config: each_token(
                model, long, ChunkReuseCache(model, stores[id(model)], live_quant=config)
            ),
            3,
        )


def markdown(result: Result) -> str:
    """The table."""
    lines = [f"Tier `{result['tier']}`, {result['shape']}; {measured_on(result['provenance'])}", ""]
    for heads, found in result["models"].items():
        lines += [f"| heads {heads} | sdpa | kvboost_fa2 | ratio |", "| --- | ---: | ---: | ---: |"]
        lines += [
            f"| {name} | {row['sdpa']:.1f} ms | {row['kvboost_fa2']:.1f} ms | {row['ratio']:.2f} |"
            for name, row in found.items()
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=7)
    add_shape(parser, "small")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    result: Result = {
        "provenance": provenance(sys.argv[1:], "attention_models.py"),
        "tier": active_tier(options.device, shape.dtype),
        "shape": shape.describe(),
        "models": {},
    }
    record = Record(f"attention-models-{options.device}", options, result, markdown)
    for heads, sharing in HEADS.items():
        models = {}
        for attention in ATTENTIONS:
            kv_heads = shape.sizes["num_attention_heads"] // sharing
            models[attention] = make_model(options.device, options.shape, num_key_value_heads=kv_heads)
            models[attention].set_attn_implementation(attention)
        cases(models, shape, options.rounds, record, heads)
    record.show()


if __name__ == "__main__":
    main()
