"""Writes the golden store: stored K/V of an older version, which every later version must find and read.

    python -m tests.golden_store.write FOLDER
    python -m tests.golden_store.write --fingerprints

`tier/` and `sealed/` beside this file were written so, once. Write them again only where the stored format or the keys
change on purpose, and say so in CHANGELOG.md: whatever users keep on disk is computed again then. The second command
writes the fingerprints of the models with the installed release of transformers.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

from kvboost_hf import ChunkReuseCache, ChunkStore, KVQuantConfig, ReusePolicy
from kvboost_hf.cache import identity as identity_fingerprint
from kvboost_hf.cache.identity import ModelFingerprint, foreign
from kvboost_hf.cache.store.history import ComputePace

CHUNK = 32
SEALED, TIER = "sealed", "tier"
FINGERPRINTS = Path(__file__).with_name("fingerprints.json")
TIER_KEY = b"of the golden store, and nothing else"
CODECS: dict[str, str | KVQuantConfig] = {
    **{name: name for name in ("raw", "int8", "turboquant")},
    # As these two were before the first tokens of a prompt stayed exact.
    "int8, all coded": KVQuantConfig(method="kivi", key_bits=8, value_bits=8, sink_tokens=0),
    "turboquant, all coded": KVQuantConfig(sink_tokens=0),
}
CASES = [*(("llama", codec) for codec in CODECS), ("qwen3_next", "raw")]
MOVED = ReusePolicy(mode="blend", repair="none", min_prefill_saving=0)

_COMMON: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 199,
}


def ids(n: int, seed: int) -> torch.Tensor:
    """Ids [1, n] that no version of any library changes."""
    return torch.from_numpy(np.random.RandomState(seed).randint(2, 199, (1, n)).astype(np.int64))


PROMPT = ids(75, seed=1)  # two chunks, and an unfinished one of 11 tokens
DOCUMENTS = [ids(48, seed=2), ids(40, seed=3)]
RETRIEVAL = torch.cat([ids(20, seed=4), DOCUMENTS[1], DOCUMENTS[0], ids(9, seed=5)], dim=1)


def make_model(name: str) -> PreTrainedModel:
    """A tiny model whose weights no version of any library changes."""
    if name == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**_COMMON, num_hidden_layers=2))
    else:
        model = Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **_COMMON,
                num_hidden_layers=2,
                layer_types=["linear_attention", "full_attention"],
                head_dim=16,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
                linear_num_key_heads=1,
                linear_num_value_heads=2,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                shared_expert_intermediate_size=32,
            )
        )
    for parameter_name, parameter in model.named_parameters():
        drawn = np.random.RandomState(crc32(parameter_name.encode())).standard_normal(tuple(parameter.shape))
        scaled = 0.2 * drawn if parameter.ndim > 1 else 0.5 + 0.1 * drawn
        parameter.data.copy_(torch.from_numpy(scaled))
    return model.eval()


@contextmanager
def fixed() -> Iterator[None]:
    """Fingerprints without the versions of libraries, and nothing that computes faster than it is loaded."""

    def durable(self: ModelFingerprint, model: PreTrainedModel, **how: Any) -> bytes:
        return type(model).__name__.encode()

    with (
        patch.object(ModelFingerprint, "durable", durable),
        patch.object(ComputePace, "seconds_per_token", lambda self, model: 1.0),
    ):
        yield


def open_store(model: PreTrainedModel, folder: Path, codec: str) -> ChunkStore:
    """A store over the tier in a folder, which `SEALED` names if it is to be sealed."""
    key = TIER_KEY if folder.name == SEALED else None
    tiers = [f"disk:{folder}:1GB"]
    return ChunkStore(model, chunk_size=CHUNK, codec=CODECS[codec], salt="golden", tiers=tiers, tier_key=key)


def generate(model: PreTrainedModel, prompt: torch.Tensor, cache: ChunkReuseCache | None = None) -> list[int]:
    """The tokens that follow a prompt."""
    call: Any = model.generate
    mask = torch.ones_like(prompt)
    return call(prompt, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False)[0].tolist()


def fill(model: PreTrainedModel, store: ChunkStore) -> None:
    """A prompt; where K/V can be moved and is kept as it is, documents, and a prompt that they were moved into."""
    cache = ChunkReuseCache(model, store)
    generate(model, PROMPT, cache)
    cache.reset()
    if type(model).__name__ == "LlamaForCausalLM" and store.codec.lossless:
        store.warm(documents=DOCUMENTS)
        cache = ChunkReuseCache(model, store, MOVED)
        generate(model, RETRIEVAL, cache)
        cache.reset()


def write(folder: Path) -> None:
    """Write both tiers."""
    with fixed():
        for name, codec in CASES:
            model = make_model(name)
            with open_store(model, folder / TIER, codec) as store:
                fill(model, store)
        model = make_model("llama")
        with open_store(model, folder / SEALED, "raw") as store:
            generate(model, PROMPT[:, :40], ChunkReuseCache(model, store))


def fingerprint(name: str, attention: str) -> str:
    """The durable fingerprint of a model, as if all versions of torch and transformers were one."""

    def nameless(module: str) -> str:
        return module.partition(".")[0]

    model: Any = make_model(name)
    model.set_attn_implementation(attention)
    with (
        patch.object(foreign, "_version", nameless),
        patch.object(identity_fingerprint, "library_versions", lambda: ()),
    ):
        found = ModelFingerprint().durable(model)
    assert isinstance(found, bytes), found
    return found.hex()


def fingerprints() -> dict[str, dict[str, str]]:
    """By release of transformers, the fingerprints of models when they were written."""
    found: dict[str, dict[str, str]] = json.loads(FINGERPRINTS.read_text("utf-8"))
    return found


def write_fingerprints() -> None:
    """Write the fingerprints of models with the installed release of transformers."""
    now = {
        f"{name} {attention}": fingerprint(name, attention)
        for name in ("llama", "qwen3_next")
        for attention in ("sdpa", "kvboost_fa2")
    }
    text = json.dumps({**fingerprints(), transformers.__version__: now}, indent=2)
    FINGERPRINTS.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--fingerprints":
        write_fingerprints()
    else:
        write(Path(sys.argv[1]))
