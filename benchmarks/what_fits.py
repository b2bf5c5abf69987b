"""What of a model stays on a device, and what that leaves of its speed: the table of docs/streaming.md.

python benchmarks/what_fits.py
"""

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from kvboost_hf.config import StreamingConfig
from kvboost_hf.offload.plan import plan_residency
from kvboost_hf.offload.sizes import estimate_sizes

BUDGETS = (8, 12, 24)  # GB
LINKS = (12, 25, 53)  # GB/s: about PCIe 3.0, 4.0 and 5.0 with 16 lanes


def qwen(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=152_064,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


MODELS: dict[str, PreTrainedConfig] = {
    "Qwen2.5-7B": qwen(3584, 18_944, 28, 28, 4),
    "Llama-3.1-8B": llama(4096, 14_336, 32, 32, 8),
    "Qwen2.5-14B": qwen(5120, 13_824, 48, 40, 8),
    "Qwen2.5-32B": qwen(5120, 27_648, 64, 40, 8),
    "Llama-3.1-70B": llama(8192, 28_672, 80, 64, 8),
}


def table() -> str:
    """In markdown."""
    lines = [
        "| shapes of | a layer | GB | resident / streamed | " + " | ".join(f"{link} GB/s" for link in LINKS) + " |",
        "| --- | ---: | ---: | ---: |" + " ---: |" * len(LINKS),
    ]
    for name, config in MODELS.items():
        sizes = estimate_sizes(config, StreamingConfig(), bits=4)
        layer = f"{sizes.layer_bytes[0] / 1e6:.1f} MB"
        for budget in BUDGETS:
            asked = StreamingConfig(vram_budget=f"{budget}GB")
            try:
                plan = plan_residency(sizes, asked, free_bytes=asked.vram_bytes)
            except ValueError:  # not even the slots fit
                row = ["none", *["" for _ in LINKS]]
            else:
                row = [f"{len(plan.resident)} / {len(plan.in_host)}"]
                row += [f"{plan.tokens_per_s(link * 1e9):.2f}" if plan.in_host else "" for link in LINKS]
            lines.append(f"| {name} | {layer} | {budget} | {' | '.join(row)} |")
            if row[0].endswith("/ 0"):  # and with more
                break
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
