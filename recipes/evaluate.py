"""Measures how well a model answers questions about documents it never saw, by greedy ``generate()``.

Run it as ``python -m recipes.evaluate`` for the table of the embedded reader's model card.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost_hf.assets import load_embedded
from kvboost_hf.assets.texts import encode
from kvboost_hf.assets.world import ChatTurn, Fact, chat_messages, make_chat, make_documents


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt, the fact it asks for and what the model said."""

    fact: Fact
    num_prompt_tokens: int
    said: str

    @property
    def right(self) -> bool:
        return self.said == self.fact.answer


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of the questions whose whole answer was right, in [0, 1]; NaN where there was no such question."""

    questions: tuple[Question, ...]

    @property
    def overall(self) -> float:
        return _share_right(self.questions)

    @property
    def pronoun(self) -> float:
        """The same for the facts whose sentence names its subject by pronoun only."""
        return _share_right([question for question in self.questions if question.fact.pronoun])

    @property
    def mean_prompt_tokens(self) -> float:
        return sum(question.num_prompt_tokens for question in self.questions) / max(len(self.questions), 1)


def _share_right(questions: Sequence[Question]) -> float:
    return sum(question.right for question in questions) / len(questions) if questions else float("nan")


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, str]],
    *,
    max_new_tokens: int = 16,
) -> tuple[str, int]:
    """Answers a chat greedily under full prefill.

    Args:
        model: Any causal language model with `tokenizer`'s vocabulary.
        tokenizer: One with a chat template.
        messages: The chat; the last message is the user's.
        max_new_tokens: Most tokens of the answer.

    Returns:
        The answer's text without special tokens, and the number of tokens of the prompt.
    """
    input_ids = encode_chat(tokenizer, messages).to(model.device)
    num_prompt_tokens = input_ids.shape[1]
    output = cast(Any, model).generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=max_new_tokens
    )
    said = tokenizer.decode(output[0, num_prompt_tokens:].tolist(), skip_special_tokens=True)
    return cast(str, said), num_prompt_tokens


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> torch.Tensor:
    """Encodes a chat up to the start of the next answer.

    Args:
        tokenizer: One with a chat template.
        messages: The chat; the last message is the user's.

    Returns:
        Token ids of shape ``[1, num_tokens]``, int64, on the CPU.
    """
    return torch.tensor([encode(tokenizer, messages)])


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_documents: int,
    num_questions: int,
    seed: int,
    num_words: int = 128,
    pronoun_start: bool = False,
    hide_document: bool = False,
) -> Accuracy:
    """Asks single-turn questions, each about documents of its own, all in one user message.

    Args:
        model: The model to measure.
        tokenizer: The tokenizer of the model.
        num_documents: Documents in each prompt.
        num_questions: Number of prompts.
        seed: Below 10 000, so that the embedded reader was not trained on these documents.
        num_words: Length of the documents, see :func:`make_documents`.
        pronoun_start: As :func:`make_documents` takes it.
        hide_document: Whether to leave the document that holds the answer out of the prompt: a control, which brings
            a sound measure down to chance.

    Returns:
        What was asked and answered.
    """
    questions: list[Question] = []
    for index in range(num_questions):
        rng = random.Random(f"{seed}/{index}")
        documents = make_documents(rng, num_documents, num_words=num_words, pronoun_start=pronoun_start)
        source = rng.choice(documents)
        fact = rng.choice(source.facts)
        shown = tuple(document for document in documents if not hide_document or document is not source)
        questions.append(_ask(model, tokenizer, fact, chat_messages([ChatTurn(shown, fact)])))
    return Accuracy(tuple(questions))


def chat_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_chats: int,
    seed: int,
    num_turns: int = 8,
    num_words: int = 128,
) -> Accuracy:
    """Asks every turn of multi-turn chats, in which the model's own answers are the history.

    Args:
        model: The model to measure.
        tokenizer: The tokenizer of the model.
        num_chats: Number of chats.
        seed: Below 10 000, so that the embedded reader was not trained on these documents.
        num_turns: Turns of a chat, each with a new document, see :func:`make_chat`.
        num_words: Length of the documents of all turns but the first.

    Returns:
        What was asked and answered, ``num_chats * num_turns`` questions.
    """
    questions: list[Question] = []
    for index in range(num_chats):
        turns = make_chat(random.Random(f"{seed}/{index}"), num_turns, num_words=num_words)
        answers: list[str] = []
        for num_asked in range(1, num_turns + 1):
            messages = chat_messages(turns[:num_asked], answers)
            question = _ask(model, tokenizer, turns[num_asked - 1].fact, messages)
            answers.append(question.said)
            questions.append(question)
    return Accuracy(tuple(questions))


def _ask(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, fact: Fact, messages: Sequence[dict[str, str]]
) -> Question:
    said, num_prompt_tokens = answer(model, tokenizer, messages)
    return Question(fact, num_prompt_tokens, said)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the table of accuracies to the standard output, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=400, help="questions in each row")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    model, tokenizer = load_embedded()

    def row(name: str, measured: Accuracy) -> None:
        sys.stdout.write(
            f"| {name} | {measured.mean_prompt_tokens:.0f} | {len(measured.questions)} | {measured.overall:.1%} "
            f"| {measured.pronoun:.1%} |\n"
        )
        sys.stdout.flush()

    sys.stdout.write("| prompt | tokens (mean) | questions | right | right, pronoun facts |\n|---|---|---|---|---|\n")
    ask = partial(accuracy, model, tokenizer, num_questions=options.questions, seed=options.seed)
    for num_documents in (1, 6, 12, 24):
        row(f"{num_documents} document{'s' if num_documents > 1 else ''}", ask(num_documents=num_documents))
    row("6 documents that start with a pronoun", ask(num_documents=6, pronoun_start=True))
    row("6 documents less the one asked about (control)", ask(num_documents=6, hide_document=True))
    row("chat of 8 turns", chat_accuracy(model, tokenizer, num_chats=options.questions // 8, seed=options.seed))


if __name__ == "__main__":
    main()
