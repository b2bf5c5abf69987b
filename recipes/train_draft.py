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
    rng = random.Random(HELD_OUT_SEEDS.stop + seed)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    start = time.monotonic()
    taught: deque[tuple[Batch, torch.Tensor]] = deque(maxlen=64)
    step, agreed, elapsed = 0, 0.0, 0.0
    draft.train()
    while elapsed < 1:
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(1.0, (step + 1) / 50) * max(0.03, 1 - elapsed)
        if step % STEPS_PER_BATCH == 0:
            batch = make_reading_batch(rng, rng.choice(STAGES), tokenizer)
            with torch.no_grad():
                taught.append((batch, _answer_logits(reader, batch).log_softmax(-1)))
        batch, wanted = taught[-1] if step % STEPS_PER_BATCH == 0 else rng.choice(taught)
        given = _answer_logits(draft, batch).log_softmax(-1)
        loss = torch.nn.functional.kl_div(given, wanted, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        agreed = (given.argmax(-1) == wanted.argmax(-1)).float().mean().item()
        step += 1
        elapsed = (time.monotonic() - start) / (60 * minutes)
        if step % 25 == 0:
            logger.info("%5.1f min, step %d, loss %.3f, agreed %.3f", minutes * elapsed, step, loss.item(), agreed)
        if step % STEPS_PER_SAVE == 0:
            on_save()
    draft.train(False)
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
