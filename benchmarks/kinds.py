"""Exact reuse in models whose layers keep other things than all K/V.

    python benchmarks/kinds.py --out benchmarks/results [--device cuda]

For each model: a prompt of which all but the last 32 tokens were seen before: plain, from the live cache, and from
the store; and a prompt that was never seen. Clocks, rounds and medians are those of `reuse.py`. The models are random,
4 or 8 layers of 512, in float32; on a CPU linear attention runs in transformers' reference code, which is slow.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from reuse import Ids, Result, in_turn, measured_on, medians, provenance, rounded, ttft
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility
from kvboost_hf.compat import cache_argument

SHARED, UNSEEN = 1000, 32
_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 16_384,
    "eos_token_id": None,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
_LINEAR = {"linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full attention": ("llama", {}),
    "sliding window of 256": ("mistral", {"sliding_window": 256}),
    "full and sliding, in turn": ("gemma2", {"sliding_window": 256}),
    "linear and full, 3 to 1": (
        "qwen3_next",
        {**_LINEAR, "linear_value_head_dim": 64, "mlp_only_layers": list(range(8))},
    ),
    "linear beside full, in one layer": (
        "falcon_h1",
        {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "num_hidden_layers": 4},
    ),
    "state only": ("mamba2", {"num_heads": 16, "head_dim": 64, "n_groups": 1, "num_hidden_layers": 4}),
}


def make(name: str, device: str) -> PreTrainedModel:
    model_type, sizes = KINDS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_SIZES, **sizes})
    model = AutoModelForCausalLM.from_config(config).eval().to(device)
    check_model_compatibility(model)
    return model


def measure(model: PreTrainedModel, rounds: int) -> Result:
    fresh = Ids(7)
    argument = cache_argument(model)
    shared = fresh(SHARED)
    endings = {n: fresh(UNSEEN) for n in range(-1, rounds)}
    new = {n: fresh(SHARED + UNSEEN) for n in range(-1, rounds)}
    store = ChunkStore(model)
    store.warm(shared)
    kept, told = ChunkReuseCache(model, ChunkStore(model)), ChunkReuseCache(model, store)
    ttft(model, shared, **{argument: kept})
    ttft(model, shared + endings[-1], **{argument: told})

    def reused(ids: list[int], cache: ChunkReuseCache) -> float:
        return ttft(model, ids, **{argument: cache})

    arms = {
        "plain": lambda n: ttft(model, shared + endings[n]),
        "live": lambda n: reused(shared + endings[n], kept),
        "store": lambda n: reused(shared + endings[n], ChunkReuseCache(model, store)),
        "cold": lambda n: reused(new[n], ChunkReuseCache(model, ChunkStore(model))),
    }
    found = medians(in_turn(arms, rounds))
    states = store.stats()["states"]
    return {**found, "forwarded": told.report.forwarded_tokens, "states": states, "kept_bytes": store.stats()["bytes"]}


def markdown(result: Result) -> str:
    lines = [
        f"{SHARED} tokens seen before, {UNSEEN} not; float32; {measured_on(result['provenance'])}",
        "",
        "| layers | model | plain | live | from the store | tokens forwarded | cold / plain |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in result["kinds"].items():
        plain = row["plain"]
        lines.append(
            f"| {name} | {KINDS[name][0]} | {plain:.0f} ms | {row['live']:.0f} ms ({plain / row['live']:.1f}x) "
            f"| {row['store']:.0f} ms ({plain / row['store']:.1f}x) | {row['forwarded']} | {row['cold'] / plain:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    result: Result = {"provenance": provenance(sys.argv[1:], "kinds.py"), "kinds": {}}
    for name in KINDS:
        result["kinds"][name] = measure(make(name, options.device), options.rounds)
        print(f"{name}: {rounded(result['kinds'][name])}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"kinds-{options.device}.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / f"kinds-{options.device}.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
