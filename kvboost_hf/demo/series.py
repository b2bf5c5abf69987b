"""Series of prompts on the text of the embedded model, whose right answers are known."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost_hf.assets.chat import Message, encode
from kvboost_hf.assets.world import Document
from kvboost_hf.demo.workloads import (
    CHAT_SHAPE,
    LONG_DOCUMENT_TOKENS,
    Question,
    chat_turn,
    long_document,
    shuffled_documents,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a series.

    Args:
        ids: Its tokens.
        question: What it asks, as a person reads it.
        value: What a right answer contains; None where that is unknown.
        answer: The whole right answer; None where that is unknown.
    """

    ids: list[int]
    question: str
    value: str | None = None
    answer: str | None = None


Prompts = Generator[Prompt, str, None]  # is sent the text of plain generate()'s answer


@dataclass(frozen=True, slots=True)
class Workload:
    """A series of prompts.

    Args:
        name: Its name on the command line.
        about: A description.
        ask: Makes the prompts: takes a tokenizer, their number and a seed.
        restarts: Whether a new process serves the later half.
    """

    name: str
    about: str
    ask: Callable[[Any, int, int], Prompts]
    restarts: bool = False


def chat(tokenizer: Any, count: int, seed: int) -> Prompts:
    """A chat of at most 8 turns, whose prompts grow as in `CHAT_SHAPE`."""
    messages: list[Message] = []
    documents: list[Document] = []
    for turn, target in enumerate(CHAT_SHAPE[:count]):
        question, document = chat_turn(tokenizer, messages, documents, target, seed=1000 * seed + turn)
        documents.append(document)
        messages.append({"role": "user", "content": question.text})
        said = yield asked(tokenizer, messages, question)
        messages.append({"role": "assistant", "content": said})


def document(tokenizer: Any, count: int, seed: int) -> Prompts:
    """Questions about one long document, each in a chat of its own."""
    yield from alone(tokenizer, long_document(tokenizer, LONG_DOCUMENT_TOKENS, count, seed))


def shuffled(tokenizer: Any, count: int, seed: int) -> Prompts:
    """Questions about the same documents, which each prompt holds in another order."""
    yield from alone(tokenizer, shuffled_documents(tokenizer, LONG_DOCUMENT_TOKENS, count, seed))


def alone(tokenizer: Any, questions: Sequence[Question]) -> Prompts:
    """Each question in a chat of its own."""
    for question in questions:
        yield asked(tokenizer, [{"role": "user", "content": question.text}], question)


def asked(tokenizer: Any, messages: Sequence[Message], question: Question) -> Prompt:
    """The prompt of a chat that ends with a question."""
    fact = question.fact
    return Prompt(encode(tokenizer, messages), fact.question, fact.value, fact.answer)


CHAT = Workload("chat", "a chat that grows; the answers of plain generate() go back in as text", chat)
DOCUMENT = Workload("document", "questions about one long document", document)
SHUFFLED = Workload("shuffled", "the same documents in another order for each question", shuffled)
