"""The recipe of the embedded reader: a tokenizer, a small Llama and a curriculum, for one CPU core.

An induction head is planted in the first weights and trained on repeated random tokens, without which reading is not
learned at all. Then the curriculum moves to chats about documents of :mod:`kvboost_hf.assets.world`, from one short
document without pronouns to thousands of tokens. A stage ends when nearly all answers of its latest batches were
right, and every batch is new, so that accuracy in training is held-out accuracy with the right answers so far forced.
In the reading stages most sequences get random jumps in their positions at line ends, as in PoSE
(https://arxiv.org/abs/2309.10400), so that the model reads at positions beyond the lengths it was trained on.

Run it as ``python -m recipes.train --out DIR --minutes 50``.
"""

import argparse
import logging
import math
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvboost_hf.assets import world

logger = logging.getLogger(__name__)

IGNORED_LABEL = -100
HELD_OUT_SEEDS = range(10_000)  # training draws from other seeds
MAX_POSITIONS = 8192
HIDDEN_SIZE = 128
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 64
ROPE_THETA = 500_000.0

_END_OF_TEXT = "<|endoftext|>"
_START_OF_TURN = "<|im_start|>"
_END_OF_TURN = "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer in which every word of :mod:`world` is one token.

    Returns:
        A tokenizer for any Unicode text, with a ChatML template.
    """
    predicates_and_questions = " ".join(
        f"{attribute.predicate} {attribute.question}" for attribute in world.ATTRIBUTES.values()
    )
    words = {*re.findall(r"\w+", f"{predicates_and_questions} {world.SYSTEM_PROMPT} The It She He")}
    for pool in (world.FEMALE_NAMES, world.MALE_NAMES, world.OBJECTS, *world.VALUE_POOLS):
        words.update(pool)
    corpus = sorted(f" {word}" for word in words)
    corpus += sorted(word for word in words if word[0].isupper())  # at the start of a paragraph or an answer
    corpus += ["system", "user", "assistant"]

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = byte_level
    bpe.decoder = decoders.ByteLevel()
    # The size is no limit here: merging ends when each word is one token.
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[_END_OF_TEXT, _START_OF_TURN, _END_OF_TURN],
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        bos_token=_END_OF_TEXT,
        eos_token=_END_OF_TURN,
        pad_token=_END_OF_TEXT,
        additional_special_tokens=[_START_OF_TURN],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
    )


def padded_vocabulary(tokenizer: PreTrainedTokenizerFast) -> int:
    """The size of a model's vocabulary: that of the tokenizer, rounded up to a multiple of 64."""
    return math.ceil(len(tokenizer) / 64) * 64


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Makes the untrained reader, in float32."""
    config = LlamaConfig(
        vocab_size=padded_vocabulary(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        initializer_range=0.03,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    _plant_induction_head(model)
    model.generation_config = greedy_answers(tokenizer)
    return model


def greedy_answers(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """How a reader answers if nobody says otherwise."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=32,
    )


@torch.no_grad()
def _plant_induction_head(model: LlamaForCausalLM) -> None:
    """Sets first values of some weights so that layers 0 and 1 copy what followed the same token before.

    Grown from random weights, this circuit (https://arxiv.org/abs/2209.11895) takes a small model with a vocabulary of
    this size longer than all the rest of its training. The first key-value group of layer 0 attends to the token
    before, by rotary phase alone, and writes it into a subspace of its own; that of layer 1 looks for the present
    token in that subspace and copies the token found. All other weights stay random.
    """
    half = HEAD_DIM // 2
    frequencies = ROPE_THETA ** (-torch.arange(half) / half)

    embedding = model.model.embed_tokens.weight
    embedding.normal_(0, 0.1)
    embedding[:, 0] = 0.3  # the same for all tokens: what the positional head multiplies

    fast, sharpness = 8, 3.0  # the fastest rotations tell neighbours apart
    key = torch.zeros(HEAD_DIM)
    key[:fast] = sharpness
    query = torch.zeros(HEAD_DIM)
    query[:fast] = sharpness * frequencies[:fast].cos()
    query[half : half + fast] = -sharpness * frequencies[:fast].sin()

    slow = [*range(half // 2, half), *range(half + half // 2, HEAD_DIM)]  # hardly rotate over a prompt
    basis = _orthonormal_rows(2 * len(slow), HIDDEN_SIZE)
    present, previous = basis[: len(slow)], basis[len(slow) :]
    copied = _orthonormal_rows(HEAD_DIM, HIDDEN_SIZE)

    before, match = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    before.k_proj.weight[:HEAD_DIM] *= 0.1
    before.k_proj.weight[:HEAD_DIM, 0] = key
    before.v_proj.weight[:HEAD_DIM] = 0
    before.v_proj.weight[: len(slow)] = present
    match.k_proj.weight[:HEAD_DIM] = 0
    match.k_proj.weight[slow] = 3.0 * previous
    match.v_proj.weight[:HEAD_DIM] = copied
    queries_per_group = NUM_HEADS // NUM_KV_HEADS
    for index in range(queries_per_group):
        head = slice(index * HEAD_DIM, (index + 1) * HEAD_DIM)
        before.q_proj.weight[head] *= 0.1
        before.q_proj.weight[head, 0] = query
        before.o_proj.weight[:, head] = 0
        before.o_proj.weight[:, head][:, : len(slow)] = 0.3 / queries_per_group * previous.T
        match.q_proj.weight[head] = 0
        match.q_proj.weight[head][slow] = 3.0 * present
        match.o_proj.weight[:, head] = 0.8 / queries_per_group * copied.T


def _orthonormal_rows(num_rows: int, num_columns: int) -> torch.Tensor:
    """Random orthonormal rows whose first column is zero, shape ``[num_rows, num_columns]``."""
    rows = torch.linalg.qr(torch.randn(num_columns - 1, num_rows))[0].T
    return torch.nn.functional.pad(rows, (1, 0))


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input, all of shape ``[batch, length]`` and dtype int64."""

    input_ids: torch.Tensor
    labels: torch.Tensor  # the token itself where it is to be predicted, else IGNORED_LABEL
    position_ids: torch.Tensor


TOKENS_PER_STEP = 8192  # half as many where tokens are copied


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStage:
    """Random tokens that recur after a gap of other tokens; the recurrence is to be predicted."""

    length: int
    alphabet_size: int  # tokens that occur in one sequence
    target: float
    time_share: float  # of the whole training, at most
    tokens: int = TOKENS_PER_STEP // 2  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingStage:
    """Chats about documents; the answers are to be predicted."""

    length: int
    num_words: int  # of the longest documents
    pronoun_share: float
    target: float
    time_share: float  # of the whole training, at most
    tokens: int = TOKENS_PER_STEP  # of a step


Stage = CopyStage | ReadingStage

DECAY_SHARE = 0.6  # of the time, at the end, in which the learning rate falls to 3%
CURRICULUM: tuple[Stage, ...] = (
    CopyStage(length=256, alphabet_size=256, target=0.95, time_share=0.05),
    CopyStage(length=256, alphabet_size=24, target=0.85, time_share=0.05),
    ReadingStage(length=128, num_words=32, pronoun_share=0.0, target=0.85, time_share=0.2),
    ReadingStage(length=256, num_words=48, pronoun_share=0.2, target=0.88, time_share=0.2),
    ReadingStage(length=512, num_words=96, pronoun_share=1 / 3, target=0.92, time_share=0.25),
    ReadingStage(length=1024, num_words=128, pronoun_share=1 / 3, target=0.98, time_share=0.5),
    ReadingStage(length=2048, num_words=128, pronoun_share=1 / 3, target=2.0, time_share=1.0),
)


def make_copy_batch(rng: random.Random, stage: CopyStage, vocab_size: int) -> Batch:
    """Draws sequences ``gap, x, gap, x`` of random tokens with labels on the second x.

    The first token of the second x is not to be predicted, nor is the second one in a small alphabet.
    """
    rows: list[list[int]] = []
    labels: list[list[int]] = []
    num_unpredictable = 1 if stage.alphabet_size > 100 else 2 if stage.alphabet_size > 10 else 3
    for _ in range(stage.tokens // stage.length):
        alphabet = rng.sample(range(vocab_size), stage.alphabet_size)
        num_copied = rng.randint(stage.length // 8, stage.length // 2)
        num_free = stage.length - 2 * num_copied
        num_before = rng.randint(0, num_free)
        copied = rng.choices(alphabet, k=num_copied)
        row = rng.choices(alphabet, k=num_before) + copied + rng.choices(alphabet, k=num_free - num_before) + copied
        rows.append(row)
        first = stage.length - num_copied + num_unpredictable
        labels.append([IGNORED_LABEL] * first + row[first:])
    positions = torch.arange(stage.length).expand(len(rows), -1)
    return Batch(torch.tensor(rows), torch.tensor(labels), positions)


def make_reading_batch(rng: random.Random, stage: ReadingStage, tokenizer: PreTrainedTokenizerFast) -> Batch:
    """Draws chats of at most ``stage.length`` tokens, padded on the right, with labels on the answers."""
    batch_size = stage.tokens // stage.length
    input_ids = torch.full((batch_size, stage.length), tokenizer.pad_token_id)
    labels = torch.full((batch_size, stage.length), IGNORED_LABEL)
    position_ids = torch.empty((batch_size, stage.length), dtype=torch.int64)
    newline = tokenizer.encode("\n", add_special_tokens=False)[0]
    for row in range(batch_size):
        ids, targets = _make_chat(rng, stage, tokenizer)
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.tensor(targets)
        position_ids[row] = torch.tensor(_make_positions(rng, ids, newline, stage.length))
    return Batch(input_ids, labels, position_ids)


def _make_chat(
    rng: random.Random, stage: ReadingStage, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int]]:
    """Draws one chat: documents at its head or with the turns, then questions as long as there is room."""
    ids: list[int] = []
    labels: list[int] = []

    def say(role: str, content: str) -> None:
        spoken = tokenizer.encode(content, add_special_tokens=False)
        head = [start_of_turn, *tokenizer.encode(f"{role}\n", add_special_tokens=False)]
        ids.extend([*head, *spoken, end_of_turn, newline])
        answered = [*spoken, end_of_turn] if role == "assistant" else [IGNORED_LABEL] * (len(spoken) + 1)
        labels.extend([*[IGNORED_LABEL] * len(head), *answered, IGNORED_LABEL])

    newline = tokenizer.encode("\n", add_special_tokens=False)[0]
    start_of_turn, end_of_turn = (_token_id(tokenizer, token) for token in (_START_OF_TURN, _END_OF_TURN))

    if stage.length >= 256 and rng.random() < 0.7:
        say("system", world.SYSTEM_PROMPT)
    num_words = rng.choice([stage.num_words, stage.num_words, *(n for n in (24, 48, 64) if n < stage.num_words)])
    documents = world.make_documents(
        rng,
        max(1, round(rng.uniform(0.4, 0.8) * (stage.length - 16) / (num_words + 8))),
        num_words=num_words,
        pronoun_share=stage.pronoun_share,
        pronoun_start=stage.pronoun_share > 0 and rng.random() < 0.3,
    )
    num_at_head = len(documents) if rng.random() < 0.5 else 1
    separator = rng.choice(("\n\n", "\n\n", "\n"))
    unread = deque(documents)
    known: list[world.Fact] = []
    while True:
        news = [unread.popleft() for _ in range(min(len(unread), num_at_head if not known else 1))]
        latest = [fact for document in news for fact in document.facts]
        known += latest
        rng.shuffle(known)
        if not known:
            return ids, labels
        fact = _choose_fact(rng, latest if latest and rng.random() < 0.4 else known)
        known.remove(fact)
        question = separator.join([*(document.text for document in news), fact.question])
        size = len(ids)
        say("user", question)
        say("assistant", fact.answer)
        if len(ids) > stage.length:
            return ids[:size] if size else ids[: stage.length], labels[:size] if size else labels[: stage.length]


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


def _choose_fact(rng: random.Random, facts: Sequence[world.Fact]) -> world.Fact:
    """Draws a fact, one told by pronoun in about half of the cases."""
    by_pronoun = [fact for fact in facts if fact.pronoun]
    return rng.choice(by_pronoun if by_pronoun and rng.random() < 0.3 else facts)


def _make_positions(rng: random.Random, ids: Sequence[int], newline: int, length: int) -> list[int]:
    """Counts up with jumps at some line ends, to at most 8 times the length; without jumps in every third sequence."""
    skips = [0] * length
    if rng.random() < 0.67:
        ends = [index + 1 for index, token in enumerate(ids) if token == newline and index + 1 < length]
        room = int((min(MAX_POSITIONS, 8 * length) - length) * rng.random() ** 2)
        for cut in sorted(rng.randint(0, room) for _ in range(rng.randint(1, 4))):
            skips[rng.choice([0, *ends])] += cut // 4
    positions: list[int] = []
    position = -1
    for skip in skips:
        position += 1 + skip
        positions.append(position)
    return positions


def train(
    tokenizer: PreTrainedTokenizerFast,
    model: PreTrainedModel,
    *,
    minutes: float,
    seed: int = 0,
    peak_lr: float = 2e-3,
    curriculum: Sequence[Stage] = CURRICULUM,
    on_stage_end: Callable[[Stage], None] = lambda stage: None,
) -> float:
    """Trains the model in place.

    Args:
        tokenizer: From :func:`build_tokenizer`.
        model: From :func:`build_model`, or another model that keeps its layers in `model` and its head in `lm_head`.
        minutes: Wall-clock time for all of it.
        seed: Seed of the data; the weights' first values are the caller's.
        peak_lr: Learning rate after the warm-up and until it decays, see `DECAY_SHARE`.
        curriculum: The stages, in order.
        on_stage_end: Called after each stage.

    Returns:
        Share of the answers of the last 50 steps that were right in every token.
    """
    rng = random.Random(HELD_OUT_SEEDS.stop + seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    start = time.monotonic()
    step = 0
    accuracy = 0.0
    model.train()
    for stage in curriculum:
        recent: deque[float] = deque(maxlen=50)
        stage_start = time.monotonic()
        for batch in _batches(rng, stage, tokenizer):
            elapsed = (time.monotonic() - start) / (60 * minutes)
            warm = min(1.0, (step + 1) / 100)
            lr = peak_lr * warm * max(0.03, min(1.0, (1 - elapsed) / DECAY_SHARE))
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss, right = _step(model, optimizer, batch)
            recent.append(right)
            accuracy = sum(recent) / len(recent)
            step += 1
            if step % 25 == 0:
                logger.info(
                    "%5.1f min, step %d, lr %.1e, loss %.3f, right %.3f, %s",
                    (time.monotonic() - start) / 60,
                    step,
                    lr,
                    loss,
                    accuracy,
                    stage,
                )
            out_of_time = time.monotonic() - stage_start > stage.time_share * 60 * minutes
            if elapsed >= 1 or out_of_time or (len(recent) >= 20 and sum(list(recent)[-10:]) / 10 >= stage.target):
                break
        logger.info("stage ended after %.1f min: right %.3f, %s", (time.monotonic() - start) / 60, accuracy, stage)
        on_stage_end(stage)
    return accuracy


def _batches(rng: random.Random, stage: Stage, tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    while True:
        if isinstance(stage, CopyStage):
            yield make_copy_batch(rng, stage, len(tokenizer))
        else:
            yield make_reading_batch(rng, stage, tokenizer)


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[float, float]:
    """Makes one update; returns the loss and the share of the answers (or copied tokens) that were right."""
    targets = batch.labels[:, 1:]
    wanted = targets != IGNORED_LABEL
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # With a mask given, transformers does not take the jumps in the positions for borders of packed sequences.
        hidden = model.model(
            input_ids=batch.input_ids,
            attention_mask=torch.ones_like(batch.input_ids),
            position_ids=batch.position_ids,
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][wanted]).float()
    loss = torch.nn.functional.cross_entropy(logits, targets[wanted])
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), _share_right(logits.argmax(-1) == targets[wanted], wanted)


def _share_right(token_right: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of the unbroken spans of wanted tokens that are right in every token; of the tokens if a row is one span.

    Args:
        token_right: Whether each wanted token was predicted, shape ``[num_wanted]``.
        wanted: Which tokens are wanted, shape ``[batch, length]``.
    """
    starts = wanted & ~torch.nn.functional.pad(wanted, (1, 0))[:, :-1]
    num_spans = int(starts.sum())
    if num_spans <= wanted.shape[0]:
        return token_right.float().mean().item()
    span = starts.flatten().cumsum(0)[wanted.flatten()] - 1
    wrong = torch.zeros(num_spans).index_add_(0, span, (~token_right).float())
    return (wrong == 0).float().mean().item()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Saves the reader; its weights are float32, so that a default ``from_pretrained`` gives float32."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def begin(description: str | None, minutes: float, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options of a recipe, and sets the log, the threads and the seed.

    Args:
        description: The description of the recipe.
        minutes: The minutes of the training, unless others are given.
        arguments: The arguments of the command; None takes those of the process.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model and tokenizer to")
    parser.add_argument("--minutes", type=float, default=minutes, help="wall-clock time of the training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of PyTorch")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a reader and saves it, after each stage too."""
    options = begin(__doc__, 50.0, arguments)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    train(
        tokenizer,
        model,
        minutes=options.minutes,
        seed=options.seed,
        on_stage_end=lambda stage: save(model, tokenizer, options.out),
    )
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
