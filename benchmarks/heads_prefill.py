"""Counts what it takes heads to take in a warm prompt, beside what its first token takes.

    python benchmarks/heads_prefill.py --out benchmarks/results

Multi-token-prediction layers, EAGLE-3 heads and DFlash drafters compute K/V of their own from the hidden states of the
prompt. That comes behind the first token: the second one waits for it. Where their K/V is stored with the prompt, they
compute that of the new columns; without, of all of it. Operations of matrix products are counted on tensors without
contents, of models of real shapes.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from record import write
from reuse import Result, measured_on, provenance
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvboost_hf.assets import load_embedded
from kvboost_hf.assisted.eagle import EagleHeads, KeysValues

PROMPT, RESTS = 8_000, (1, 100, 300, 1_000, 8_000)
SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "Llama 3.1 8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
_DRAFTER_LAYERS = _READ_LAYERS = 5  # of DFlash, as of z-lab/Qwen3-8B-DFlash


def operations(run: Any) -> int:
    """Multiplications and additions of a function."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return int(counter.get_total_flops())


def of_target(config: LlamaConfig, rest: int, *, head: bool = True) -> int:
    """Of a forward over the last `rest` tokens of the prompt, behind K/V of the others."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
        cache, before = DynamicCache(config=config), PROMPT - rest
        kept = torch.zeros(1, config.num_key_value_heads, before, _head_dim(config))
        for layer in range(config.num_hidden_layers if before else 0):
            cache.update(kept, kept, layer)
        given = {
            "attention_mask": torch.zeros(1, 1, rest, PROMPT),
            "position_ids": torch.zeros(1, rest, dtype=torch.long),
            "cache": cache,
        }
        ids = torch.zeros(1, rest, dtype=torch.long)
        part = model if head else model.model
        return operations(lambda: part(ids, **given, **({"logits_to_keep": 1} if head else {})))


def _head_dim(config: LlamaConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def of_heads(config: LlamaConfig, new: int) -> dict[str, int]:
    """Of each kind of heads, over the last `new` columns of the prompt, behind K/V of the others."""
    width, values = config.hidden_size, config.num_key_value_heads * _head_dim(config)
    one = LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1})
    with torch.device("meta"):
        eagle: Any = EagleHeads(one).eval()
        ids, states = torch.zeros(1, new, dtype=torch.long), [torch.zeros(1, new, width)] * 3
        kept = torch.zeros(1, config.num_key_value_heads, PROMPT - new, _head_dim(config))
        past = KeysValues(kept, kept) if new < PROMPT else None
        seen = torch.ones(new, PROMPT, dtype=torch.bool) if past is not None else None

        def run() -> None:
            found, _ = eagle(ids, hidden=eagle.fused(states), position_ids=ids, past=past, seen=seen)
            eagle.draft_logits(found[:, -1:])

        of_eagle = operations(run)
    own = of_target(one, new) + 2 * new * 2 * width * width
    blocks = 2 * new * width * (_READ_LAYERS * width + _DRAFTER_LAYERS * 2 * values)
    return {"a layer of MTP": own, "EAGLE-3": of_eagle, "DFlash": blocks}


def measure() -> Result:
    """By shape and kind of heads, the shares of their operations in those of a first token, for each of `RESTS`.

    First where they compute K/V of all of the prompt, then of what is new.
    """
    reader, _ = load_embedded()
    shapes = {"the embedded reader": reader.config, **{name: LlamaConfig(**each) for name, each in SHAPES.items()}}
    found: Result = {}
    for name, config in shapes.items():
        targets = [of_target(config, rest) for rest in RESTS]
        whole, parts = of_heads(config, PROMPT), [of_heads(config, rest) for rest in RESTS]
        found[name] = {}
        for heads, count in whole.items():
            pairs = list(zip(targets, parts, strict=True))
            found[name][heads] = [count / each for each in targets], [part[heads] / each for each, part in pairs]
    return found


def markdown(result: Result) -> str:
    lines = [
        measured_on(result["provenance"]),
        "",
        f"Operations of heads that take in a prompt of {PROMPT:,} tokens, as a share of those of its first token, for "
        "which the model computes the last tokens of the prompt: without their K/V of the others, and with it stored. "
        "Attention is counted as if nothing were masked.",
        "",
        "| shape | heads | their K/V | " + " | ".join(f"{rest:,} computed" for rest in RESTS) + " |",
        "| --- | --- | --- |" + " ---: |" * len(RESTS),
    ]
    for name, kinds in result["found"].items():
        for heads, both in kinds.items():
            for kept, shares in zip(("computed", "stored"), both, strict=True):
                cells = [f"{share:.0%}" if share >= 0.1 else f"{share:.1%}" for share in shares]
                lines.append(f"| {name} | {heads} | {kept} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    out = parser.parse_args().out
    result: Result = {"provenance": provenance(sys.argv[1:], "heads_prefill.py"), "found": measure()}
    write(out, "heads-prefill", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
