"""Exact reuse in models whose layers keep other things than all K/V.

    python benchmarks/kinds.py --out benchmarks/results [--device cuda] [--shape 8b]

For each model: a prompt of which all but the last 32 tokens were seen before: plain, from the live cache, and from
the store; and a prompt that was never seen. Clocks, rounds and medians are those of `reuse.py`. The models are random,
4 or 8 layers of 512, in float32; with the shape `8b` 8 or 16 layers of 4096, in bfloat16. On a CPU linear attention
runs in transformers' reference code, which is slow.
"""

import argparse
import sys
from functools import partial
from typing import Any, NamedTuple

from record import Record, add_options, add_shape
from reuse import Ids, in_turn, measured_on, medians, provenance, rounded, ttft
from shapes import SHAPES, Shape, drawn
from targets import Result
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvboost_hf import ChunkReuseCache, check_model_compatibility
from kvboost_hf.compat import cache_argument

UNSEEN = 32


class Size(NamedTuple):
    """Of a model.

    Example:
        >>> Size(512, 8, 64, 256, (1032,)).heads
        8
    """

    width: int
    layers: int
    head_dim: int
    window: int
    prompts: tuple[int, ...]

    @property
    def heads(self) -> int:
        """Of all kinds."""
        return self.width // self.head_dim


SIZES = {
    "tiny": Size(128, 4, 32, 64, (256,)),
    "small": Size(512, 8, 64, 256, (1032,)),
    "8b": Size(4096, 16, 128, 1024, SHAPES["8b"].prompts),
}


def kinds(size: Size) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name, the type of a model, and what its configuration has besides."""
    linear = {
        "linear_num_key_heads": size.heads,
        "linear_num_value_heads": size.heads,
        "linear_key_head_dim": size.head_dim,
        "linear_value_head_dim": size.head_dim,
        "mlp_only_layers": list(range(size.layers)),
    }
    mamba = {"mamba_d_ssm": size.width, "mamba_n_heads": size.heads, "mamba_d_head": size.head_dim}
    half = {"n_groups": 1, "num_hidden_layers": size.layers // 2}
    return {
        "full attention": ("llama", {}),
        "sliding window": ("mistral", {"sliding_window": size.window}),
        "full and sliding, in turn": ("gemma2", {"sliding_window": size.window}),
        "linear and full, 3 to 1": ("qwen3_next", linear),
        "linear beside full, in one layer": (
            "falcon_h1",
            {**mamba, "mamba_n_groups": 1, "num_hidden_layers": half["num_hidden_layers"]},
        ),
        "state only": ("mamba2", {"num_heads": 2 * size.heads, "head_dim": size.head_dim, **half}),
    }


def make(model_type: str, more: dict[str, Any], size: Size, options: argparse.Namespace) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": size.width,
        "intermediate_size": size.width * 8 // 3 // 32 * 32,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": 65_536,
        "eos_token_id": None,
        "bos_token_id": 0,
        "pad_token_id": 0,
    }
    with drawn(options.device, SHAPES[options.shape].dtype):
        config = AutoConfig.for_model(model_type, **{**sizes, **more})
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    check_model_compatibility(model)
    return model


def measure(model: PreTrainedModel, shape: Shape, tokens: int, rounds: int) -> Result:
    fresh = Ids(7)
    argument = cache_argument(model)
    shared = fresh(tokens - UNSEEN)
    endings = {n: fresh(UNSEEN) for n in range(-1, rounds)}
    new = {n: fresh(tokens) for n in range(-1, rounds)}
    store = shape.new_store(model)
    store.warm(shared)
    kept, told = ChunkReuseCache(model, shape.new_store(model)), ChunkReuseCache(model, store)
    ttft(model, shared, **{argument: kept})
    ttft(model, shared + endings[-1], **{argument: told})

    def reused(ids: list[int], cache: ChunkReuseCache) -> float:
        return ttft(model, ids, **{argument: cache})

    arms = {
        "plain": lambda n: ttft(model, shared + endings[n]),
        "live": lambda n: reused(shared + endings[n], kept),
        "store": lambda n: reused(shared + endings[n], ChunkReuseCache(model, store)),
        "cold": lambda n: reused(new[n], ChunkReuseCache(model, shape.new_store(model))),
    }
    found = medians(in_turn(arms, rounds))
    states = store.stats()["states"]
    return {**found, "forwarded": told.report.forwarded_tokens, "states": states, "kept_bytes": store.stats()["bytes"]}


def markdown(result: Result) -> str:
    lines = [
        f"All but {UNSEEN} tokens of a prompt seen before; {result['dtype']}; {measured_on(result['provenance'])}",
        "",
        "| layers | model | tokens | plain | live | from the store | tokens forwarded | cold / plain |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["kinds"]:
        plain = row["plain"]
        lines.append(
            f"| {row['layers']} | {row['model']} | {row['tokens']} | {plain:.0f} ms "
            f"| {row['live']:.0f} ms ({plain / row['live']:.1f}x) "
            f"| {row['store']:.0f} ms ({plain / row['store']:.1f}x) | {row['forwarded']} | {row['cold'] / plain:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=7)
    add_shape(parser, "small")
    options = parser.parse_args()
    size, shape = SIZES[options.shape], SHAPES[options.shape]
    result: Result = {"provenance": provenance(sys.argv[1:], "kinds.py"), "dtype": str(shape.dtype), "kinds": []}
    record = Record(f"kinds-{options.device}", options, result, markdown)

    def add(name: str, tokens: int) -> None:
        model_type, more = kinds(size)[name]
        found = measure(make(model_type, more, size, options), shape, tokens, options.rounds)
        result["kinds"].append({"layers": name, "model": model_type, "tokens": tokens, **found})
        print(f"{name}: {rounded(found)}")

    for tokens in size.prompts:
        for name in kinds(size):
            record.measure(f"{name}, {tokens}", partial(add, name, tokens))
    record.show()


if __name__ == "__main__":
    main()
