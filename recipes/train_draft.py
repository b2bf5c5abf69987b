"""The recipe of the embedded draft: one layer that learns to say what the embedded reader says.

The chats are those that the reader was trained on, see :mod:`recipes.train`. At each token of an answer the
draft learns the reader's own distribution of the next one, with the right answer so far forced, as in
https://arxiv.org/abs/1503.02531. One layer learns to name what was asked for and how the sentence goes, and seldom to
look the value up: that takes an induction head, of two layers.

Run it as ``python -m recipes.train_draft --out DIR --minutes 12``.
"""

import copy
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvboost_hf.assets import load_embedded
from recipes.train import HELD_OUT_SEEDS, IGNORED_LABEL, Batch, ReadingStage, begin, make_reading_batch, save

logger = logging.getLogger(__name__)

STEPS_PER_BATCH = 3  # asking the reader takes longer than a step
STEPS_PER_SAVE = 250
STAGES = tuple(
    ReadingStage(length=length, num_words=num_words, pronoun_share=1 / 3, target=2.0, time_share=1.0)
    for length, num_words in ((128, 32), (256, 48), (512, 96), (1024, 128))
)


def build_draft(reader: LlamaForCausalLM) -> LlamaForCausalLM:
    """Makes the untrained draft, in float32, with the reader's vocabulary.

    Its embeddings are the reader's along their 64 leading directions; all else is random.
    """
    config = LlamaConfig(
        **{
            **reader.config.to_dict(),
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        }
    )
    draft = LlamaForCausalLM(config)
    draft.generation_config = copy.deepcopy(reader.generation_config)
    embeddings = reader.model.embed_tokens.weight.detach()
    directions = torch.linalg.svd(embeddings, full_matrices=False).Vh[: config.hidden_size]
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(embeddings @ directions.T)
    return draft


def distill(
    reader: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draft: LlamaForCausalLM,
    *,
    minutes: float,
    seed: int = 0,
    peak_lr: float = 5e-3,
    on_save: Callable[[], None] = lambda: None,
) -> float:
    """Trains the draft in place.

    Args:
        reader: Whose distributions are learned; it stays as it is.
        tokenizer: That of both.
        draft: From :func:`build_draft`.
        minutes: Wall-clock time for all of it.
        seed: Seed of the data; the weights' first values are the caller's.
        peak_lr: Learning rate after the warm-up; it falls to 3% of it linearly.
        on_save: Called after every `STEPS_PER_SAVE` steps.

    Returns:
        Share of the answers' tokens in the last step at which draft and reader agreed.
    """

    def teach(batch: Batch) -> tuple[Batch, torch.Tensor]:
        with torch.no_grad():
            return batch, _answer_logits(reader, batch).log_softmax(-1)

    def learn(taught: tuple[Batch, torch.Tensor]) -> tuple[torch.Tensor, list[float]]:
        batch, wanted = taught
        given = _answer_logits(draft, batch).log_softmax(-1)
        loss = torch.nn.functional.kl_div(given, wanted, reduction="batchmean", log_target=True)
        return loss, [(given.argmax(-1) == wanted.argmax(-1)).float().mean().item()]

    weights = list(draft.parameters())
    draft.train()
    plan = Plan(minutes=minutes, seed=seed, peak_lr=peak_lr, stages=STAGES, kept=64, steps_per_save=STEPS_PER_SAVE)
    agreed = learn_answers(tokenizer, weights, teach, learn, plan, on_save)
    draft.train(False)
    return agreed[0] if agreed else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How weights are trained on answers.

    Args:
        minutes: Wall-clock time for all of it.
        seed: Seed of the data.
        peak_lr: Learning rate after the warm-up; it falls to 3% of it linearly.
        stages: The kinds of batches, of which each is drawn as often.
        kept: Batches that are learned from again.
        steps_per_save: Steps from one save to the next.
    """

    minutes: float
    seed: int
    peak_lr: float
    stages: Sequence[ReadingStage]
    kept: int
    steps_per_save: int


T = TypeVar("T")


def learn_answers(
    tokenizer: PreTrainedTokenizerFast,
    weights: Sequence[torch.nn.Parameter],
    teach: Callable[[Batch], T],
    learn: Callable[[T], tuple[torch.Tensor, list[float]]],
    plan: Plan,
    on_save: Callable[[], None],
) -> list[float]:
    """Trains weights on answers whose distributions a reader has told, each of them several times.

    Args:
        tokenizer: Makes the batches.
        weights: What is trained.
        teach: Has the reader tell the distributions of a batch.
        learn: Gives the loss on what it has told, and the shares of tokens at which both agreed.
        plan: How.
        on_save: Called after every `plan.steps_per_save` steps.

    Returns:
        The shares of the last step.
    """
    rng = random.Random(HELD_OUT_SEEDS.stop + plan.seed)
    optimizer = torch.optim.AdamW(weights, lr=plan.peak_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    start = time.monotonic()
    taught: deque[T] = deque(maxlen=plan.kept)
    step, agreed, elapsed = 0, list[float](), 0.0
    while elapsed < 1:
        for group in optimizer.param_groups:
            group["lr"] = plan.peak_lr * min(1.0, (step + 1) / 50) * max(0.03, 1 - elapsed)
        if step % STEPS_PER_BATCH == 0:
            taught.append(teach(make_reading_batch(rng, rng.choice(plan.stages), tokenizer)))
        loss, agreed = learn(taught[-1] if step % STEPS_PER_BATCH == 0 else rng.choice(taught))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        step += 1
        elapsed = (time.monotonic() - start) / (60 * plan.minutes)
        if step % 25 == 0:
            shares = " ".join(f"{each:.3f}" for each in agreed)
            logger.info("%5.1f min, step %d, loss %.3f, agreed %s", plan.minutes * elapsed, step, loss.item(), shares)
        if step % plan.steps_per_save == 0:
            on_save()
    return agreed


def _answer_logits(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Logits where the answers' tokens are predicted, shape ``[num_answer_tokens, vocab]``, float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(
            input_ids=batch.input_ids,
            attention_mask=torch.ones_like(batch.input_ids),  # else jumps in the positions look like packed sequences
            position_ids=batch.position_ids,
            use_cache=False,
        ).last_hidden_state
        logits: torch.Tensor = model.lm_head(hidden[:, :-1][batch.labels[:, 1:] != IGNORED_LABEL])
    return logits.float()


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a draft and saves it, on the way too."""
    options = begin(__doc__, 12.0, arguments)
    reader, tokenizer = load_embedded()
    draft = build_draft(reader)

    def keep() -> None:
        save(draft, tokenizer, options.out)

    distill(reader, tokenizer, draft, minutes=options.minutes, seed=options.seed, on_save=keep)
    keep()


if __name__ == "__main__":
    main()
