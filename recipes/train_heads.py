"""The recipe of EAGLE-3 heads for the embedded reader: one layer that reads the reader's hidden states.

The chats are those that the reader was trained on, see :mod:`recipes.train`. As in EAGLE-3
(https://arxiv.org/abs/2503.01840), the heads are trained on what they will read when they draft: `DEPTH` steps, of
which the first reads hidden states of the reader, and each further one what the step before has computed. At each step
they learn the reader's own distribution of the token that comes next, with the right answer so far forced.

Run it as ``python -m recipes.train_heads --out DIR --minutes 12``. The folder has the files that
``load_assistant(DIR, target=reader)`` loads, in the format of the field. A Llama has no place for
multi-token-prediction layers: its configuration names none, and `MtpModel` of transformers loads none for it.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvboost_hf.assets import load_embedded
from kvboost_hf.assisted.eagle import EagleHeads
from recipes.train import HELD_OUT_SEEDS, IGNORED_LABEL, Batch, ReadingStage, begin, make_reading_batch
from recipes.train_draft import Plan, learn_answers

logger = logging.getLogger(__name__)

LAYERS = (1, 2, 3)  # of four, by their numbers in what `output_hidden_states` returns
DEPTH = 4
DECAY = 0.8  # weight of a step beside the step before
STEPS_PER_SAVE = 100
VOCABULARY_BATCHES = 24
STAGES = tuple(
    ReadingStage(length=length, num_words=num_words, pronoun_share=1 / 3, target=2.0, time_share=1.0, tokens=4096)
    for length, num_words in ((128, 32), (256, 48), (512, 96))
)


def build_heads(reader: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> EagleHeads:
    """Makes untrained heads, in float32, which draft the tokens that answers have.

    Norm and head are the reader's to begin with, and the high layer passes `fc`.
    """
    rng = random.Random(HELD_OUT_SEEDS.stop - 1)
    said = set[int]()
    for _ in range(VOCABULARY_BATCHES):
        labels = make_reading_batch(rng, rng.choice(STAGES), tokenizer).labels
        said |= set(labels[labels != IGNORED_LABEL].tolist())
    known = torch.tensor(sorted(said))
    config = LlamaConfig(
        **{
            **reader.config.to_dict(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "draft_vocab_size": len(known),
            "eagle_aux_hidden_state_layer_ids": list(LAYERS),
            "tie_word_embeddings": False,
        }
    )
    heads = EagleHeads(config)
    width = config.hidden_size
    with torch.no_grad():
        heads.fc.weight.mul_(0.1)[:, -width:] += torch.eye(width)
        heads.midlayer.self_attn.o_proj.weight.mul_(0.1)
        heads.midlayer.mlp.down_proj.weight.mul_(0.1)
        heads.norm.weight.copy_(reader.model.norm.weight)
        heads.lm_head.weight.copy_(reader.lm_head.weight[known])
        heads.d2t.copy_(known - torch.arange(len(known)))
        heads.t2d.zero_().index_fill_(0, known, True)
    heads.embed_tokens = reader.get_input_embeddings()
    return heads


def distill(
    reader: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    heads: EagleHeads,
    *,
    minutes: float,
    seed: int = 0,
    peak_lr: float = 3e-3,
    on_save: Callable[[], None] = lambda: None,
) -> list[float]:
    """Trains the heads in place.

    Args:
        reader: Whose distributions are learned; it stays as it is.
        tokenizer: That of both.
        heads: From :func:`build_heads`.
        minutes: Wall-clock time for all of it.
        seed: Seed of the data; the weights' first values are the caller's.
        peak_lr: Learning rate after the warm-up; it falls to 3% of it linearly.
        on_save: Called after every `STEPS_PER_SAVE` steps.

    Returns:
        For each step of a draft, the share of the last batch's answer tokens at which heads and reader agreed.
    """

    def learn(taught: tuple[Batch, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, list[float]]:
        batch, states, wanted = taught
        loss, agreed = torch.zeros(()), list[float]()
        for depth, given in enumerate(_drafted(heads, batch, states)):
            loss = loss + DECAY**depth * F.kl_div(given, wanted, reduction="batchmean", log_target=True)
            agreed.append((given.argmax(-1) == wanted.argmax(-1)).float().mean().item())
        return loss, agreed

    own = [weight for name, weight in heads.named_parameters() if not name.startswith("embed_tokens")]
    plan = Plan(minutes=minutes, seed=seed, peak_lr=peak_lr, stages=STAGES, kept=48, steps_per_save=STEPS_PER_SAVE)
    return learn_answers(tokenizer, own, partial(_asked, reader, heads), learn, plan, on_save)


def _answers(batch: Batch) -> torch.Tensor:
    """Positions behind which heads are asked for a token of an answer, [batch, length - 2], bool."""
    return batch.labels[:, 2:] != IGNORED_LABEL


@torch.no_grad()
def _asked(reader: LlamaForCausalLM, heads: EagleHeads, batch: Batch) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """A batch, the reader's hidden states [batch, length - 2, 3 * hidden_size], and its log probabilities."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = reader.model(
            input_ids=batch.input_ids,
            attention_mask=torch.ones_like(batch.input_ids),  # else jumps in the positions look like packed sequences
            position_ids=batch.position_ids,
            use_cache=False,
            output_hidden_states=True,
        )
        logits = reader.lm_head(output.last_hidden_state[:, 1:-1][_answers(batch)]).float()
    shown: Any = output.hidden_states
    states = torch.cat([shown[layer][:, :-2].float() for layer in LAYERS], dim=-1)
    return batch, states, logits[:, heads.targets].log_softmax(-1)


def _drafted(heads: EagleHeads, batch: Batch, states: torch.Tensor) -> Iterator[torch.Tensor]:
    """Log probabilities [answer tokens, draft_vocab_size] of each step of a draft.

    In step s, position p has read hidden states of the reader up to p - s, and computed those up to p itself: it
    attends to the first step's K/V up to p - s, and to that of step j at p - s + j.
    """
    layer: Any = heads.midlayer
    attention, length = layer.self_attn, states.shape[1]
    embeds = heads.embed_tokens(batch.input_ids[:, 1:-1]).detach()
    rotary = heads.rotary_emb(states, batch.position_ids[:, :-2])
    answers = _answers(batch)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    hidden = heads.fc(states)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def by_head(projected: torch.Tensor) -> torch.Tensor:
        return projected.view(*projected.shape[:2], -1, attention.head_dim).transpose(1, 2)

    for step in range(DEPTH):
        both = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)
        queries, keys = apply_rotary_pos_emb(by_head(attention.q_proj(both)), by_head(attention.k_proj(both)), *rotary)
        held.append((keys, by_head(attention.v_proj(both))))
        scores = (queries @ held[0][0].transpose(2, 3)).masked_fill(~seen.tril(-step), -torch.inf)
        chain = [_later(keys, step - at) for at, (keys, _) in enumerate(held) if at]
        scores = torch.cat([scores, *((queries * keys).sum(-1, keepdim=True) for keys in chain)], dim=-1)
        odds = (scores * attention.head_dim**-0.5).softmax(-1).nan_to_num()  # the first positions see nothing
        found = odds[..., :length] @ held[0][1]
        for at in range(1, step + 1):
            found = found + odds[..., length + at - 1, None] * _later(held[at][1], step - at)
        hidden = hidden + attention.o_proj(found.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        yield heads.draft_logits(hidden[answers]).log_softmax(-1)
        hidden = _later(hidden[:, None], 1)[:, 0]


def _later(states: torch.Tensor, by: int) -> torch.Tensor:
    """States [batch, heads, length, dim] of so many positions before."""
    return F.pad(states, (0, 0, by, 0))[:, :, : states.shape[2]]


def save_heads(heads: EagleHeads, out: Path) -> None:
    """Saves heads as the field does: without the embeddings, which are the target's."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: each.contiguous() for name, each in heads.state_dict().items() if "embed_tokens" not in name}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    heads.config.architectures = ["LlamaForCausalLMEagle3"]
    heads.config.to_json_file(out / "config.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains heads and saves them, on the way too."""
    options = begin(__doc__, 12.0, arguments)
    reader, tokenizer = load_embedded()
    heads = build_heads(reader, tokenizer)
    logger.info("%d of %d tokens are drafted", len(heads.d2t), heads.config.vocab_size)

    def keep() -> None:
        save_heads(heads, options.out)

    distill(reader, tokenizer, heads, minutes=options.minutes, seed=options.seed, on_save=keep)
    keep()


if __name__ == "__main__":
    main()
