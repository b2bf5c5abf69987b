"""The recipe of a small hybrid reader: a Qwen3-Next with three layers of gated delta rule and one of full attention.

It learns to read the same chats as the embedded reader (:mod:`recipes.train`), and has its tokenizer. Its weights are
not part of the package: benchmarks of states that need a trained model take the folder that this recipe writes.

No induction head is planted. Where the tokens of a sequence are few, copying is learned from nothing: first the model
learns to say any token of the sequence, then the one that followed. A short convolution shows each layer the token
before. From sequences of 256 tokens alone it learned nothing in as many steps.

Run it as ``python -m recipes.train_hybrid --out DIR --minutes 20``, with more where other programs use the core. It
needs some 375 steps to copy, and 1,700 more to answer 19 of 20 questions about what it reads.
"""

import argparse
import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM

from recipes.train import (
    MAX_POSITIONS,
    ROPE_THETA,
    CopyStage,
    ReadingStage,
    Stage,
    begin,
    build_tokenizer,
    greedy_answers,
    padded_vocabulary,
    save,
    train,
)

KINDS = {"L": "linear_attention", "F": "full_attention"}
LAYERS = "LLLF"
HEADS, HEAD_DIM = 2, 64  # of linear attention
LEAST_STEP, LARGEST_STEP = 1e-3, 0.1
CURRICULUM: tuple[Stage, ...] = (
    CopyStage(length=64, alphabet_size=8, target=0.8, time_share=0.4),
    CopyStage(length=64, alphabet_size=16, target=0.85, time_share=0.2),
    CopyStage(length=128, alphabet_size=256, target=0.95, time_share=0.2),
    ReadingStage(length=128, num_words=32, pronoun_share=0.0, target=0.85, time_share=0.3, tokens=4096),
    ReadingStage(length=256, num_words=48, pronoun_share=0.2, target=0.85, time_share=0.3, tokens=4096),
    ReadingStage(length=512, num_words=96, pronoun_share=1 / 3, target=2.0, time_share=1.0, tokens=4096),
)


def build_model(tokenizer: PreTrainedTokenizerFast, layers: str = LAYERS) -> Qwen3NextForCausalLM:
    """Makes the untrained reader, in float32, with dense layers in place of experts.

    Args:
        tokenizer: The tokenizer of the model.
        layers: The kind of each layer: L for linear attention, F for full attention.
    """
    config = Qwen3NextConfig(
        vocab_size=padded_vocabulary(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(layers),
        layer_types=[KINDS[kind] for kind in layers],
        mlp_only_layers=list(range(len(layers))),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        initializer_range=0.03,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3NextForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.1)
        for kind, layer in zip(layers, model.model.layers, strict=True):
            if kind == "L":
                _make_memory_long(layer.linear_attn.dt_bias)
    model.generation_config = greedy_answers(tokenizer)
    return model


def _make_memory_long(dt_bias: torch.Tensor) -> None:
    """Sets the first steps of heads as Mamba-2 does: by transformers' own first values a state is gone at once."""
    span = math.log(LARGEST_STEP / LEAST_STEP)
    step = LEAST_STEP * torch.exp(torch.rand_like(dt_bias) * span)
    dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus makes the step of it


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a hybrid reader and saves it, after each stage too."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--layers", default=LAYERS, help="L for linear attention, F for full attention")
    own, others = parser.parse_known_args(arguments)
    options = begin(__doc__, 20.0, others)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, own.layers)
    train(
        tokenizer,
        model,
        minutes=options.minutes,
        seed=options.seed,
        curriculum=CURRICULUM,
        on_stage_end=lambda stage: save(model, tokenizer, options.out),
    )
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
