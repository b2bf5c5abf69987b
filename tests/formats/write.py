"""`python -m tests.formats.write [CASE ...]`: checkpoints by their own tools, and the logits that these compute.

It needs the tools, which `.venv` does not have: `make formats` runs it in an environment of its own. What
`--keep` wrote is in this folder.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kvboost_hf import load_streamed

HERE = Path(__file__).parent
LOGITS = "logits.safetensors"
IDS = torch.arange(3, 60, 5)[None]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
OLDER_READER = "compressed_tensors_mixed"  # transformers 5.24 expects its zero points unpacked; 5.17 reads them
INT4: dict[str, Any] = {"num_bits": 4, "type": "int"}


def dense() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def mixture() -> PreTrainedModel:
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))


def made(make: Callable[[], PreTrainedModel], folder: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model with random weights, biases and norms, loaded from a folder, as the tools want it."""
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.to(dtype).save_pretrained(folder)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return loaded


def compressed(
    make: Callable[[], PreTrainedModel], groups: dict[str, Any], ignore: list[str]
) -> Callable[[Path], None]:
    """By llm-compressor, in bfloat16."""

    def write(folder: Path) -> None:
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier

        with TemporaryDirectory() as plain:
            model = made(make, plain, torch.bfloat16)
            oneshot(model=model, recipe=QuantizationModifier(config_groups=groups, ignore=ignore))
            model.save_pretrained(folder, save_compressed=True)

    return write


def computed(folder: Path) -> torch.Tensor:
    """The logits of the tool's own reader and forward, in float32: it rounds weights to the dtype of scales."""
    if "gptq" in folder.name:
        from gptqmodel import BACKEND, GPTQModel

        model = GPTQModel.load(str(folder), backend=BACKEND.GPTQ_TORCH, dtype=torch.float16).model.float()
        return logits_of(model)
    with TemporaryDirectory() as wide:
        copyfile(folder / "config.json", Path(wide, "config.json"))
        tensors = load_file(folder / "model.safetensors")
        tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        save_file(tensors, Path(wide, "model.safetensors"), metadata={"format": "pt"})
        return logits_of(AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def gptq(make: Callable[[], PreTrainedModel], **settings: Any) -> Callable[[Path], None]:
    """By GPTQModel, in float16."""

    def write(folder: Path) -> None:
        from gptqmodel import GPTQModel, QuantizeConfig

        draw = torch.Generator().manual_seed(1)
        texts = torch.randint(0, SIZES["vocab_size"], (16, 48), generator=draw)
        with TemporaryDirectory() as plain:
            made(make, plain, torch.float16)
            model = GPTQModel.load(
                plain, QuantizeConfig(bits=4, pack_impl="original", offload_to_disk=False, **settings)
            )
            model.quantize([{"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]} for ids in texts])
            model.save(str(folder))

    return write


CASES: dict[str, Callable[[Path], None]] = {
    "compressed_tensors": compressed(
        dense,
        {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**INT4, "strategy": "group", "group_size": 32, "symmetric": True},
            }
        },
        ["lm_head"],
    ),
    "compressed_tensors_mixed": compressed(
        dense,
        {
            "attention": {
                "targets": [r"re:.*self_attn\..*"],
                "weights": {**INT4, "strategy": "channel", "symmetric": True},
            },
            "feed_forward": {
                "targets": [r"re:.*mlp\..*"],
                "weights": {**INT4, "strategy": "group", "group_size": 32, "symmetric": False},
            },
        },
        ["lm_head", r"re:.*0\.mlp\.down_proj$"],
    ),
    "compressed_tensors_moe": compressed(
        mixture,
        {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**INT4, "strategy": "group", "group_size": 32, "symmetric": True},
            }
        },
        ["lm_head", r"re:.*mlp\.gate$"],
    ),
    "gptq": gptq(dense, group_size=32, desc_act=False, sym=True),
    "gptq_ordered": gptq(dense, group_size=32, desc_act=True, sym=False),
    "gptq_v2": gptq(
        dense,
        group_size=-1,
        sym=False,
        desc_act=False,
        act_group_aware=False,
        format="gptq_v2",
        dynamic={"-:.*0.mlp.down_proj": {}, ".*mlp.*": {"group_size": 32}},
    ),
    "gptq_moe": gptq(mixture, group_size=32, desc_act=True, sym=False),
}


def main() -> int:
    """Let the tools write the cases that are named, or all, and check that they are streamed as the tools compute."""
    options = argparse.ArgumentParser()
    options.add_argument("cases", nargs="*", default=list(CASES))
    options.add_argument("--keep", action="store_true", help="put the checkpoints and logits into this folder")
    given = options.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "GPTQMODEL_CPU_WORKERS": "2"}
    for case in given.cases:
        if case == OLDER_READER and not transformers.__version__.startswith("5.17."):
            sys.stdout.write(f"{case}: skipped, transformers {transformers.__version__} cannot read it back\n")
            continue
        with TemporaryDirectory() as scratch:
            folder = HERE / case if given.keep else Path(scratch, case)
            CASES[case](folder)
            for path in folder.iterdir():
                if path.name not in ("config.json", "model.safetensors"):
                    path.unlink()
            wanted = computed(folder)
            found = logits_of(load_streamed(str(folder), device="cpu", dtype=torch.float32))
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
            save_file({"logits": wanted}, folder / LOGITS)
            sys.stdout.write(f"{case}: {wanted.std():.3f}, off by {(found - wanted).abs().max():.1e} at most\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
