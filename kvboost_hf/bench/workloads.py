"""The workloads of the benchmark: series of prompts whose right answers are known."""

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost_hf.assets.chat import Message, encode
from kvboost_hf.assets.world import SYSTEM_PROMPT, Document, Fact, Turn, chat_messages, make_chat, make_documents
from kvboost_hf.demo.workloads import (
    CHAT_SHAPE,
    LONG_DOCUMENT_TOKENS,
    NUM_DOCUMENTS,
    Question,
    chat_turn,
    linked_documents,
    long_document,
)

_LIBRARY = 3 * NUM_DOCUMENTS  # documents to retrieve from
_DOCUMENT_WORDS = LONG_DOCUMENT_TOKENS // NUM_DOCUMENTS
_SHOTS, _SHOT_WORDS = 12, 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the fact that a right answer tells."""

    ids: list[int]
    fact: Fact


Prompts = Generator[Prompt, str, None]  # is sent the text of plain generate()'s answer


@dataclass(frozen=True, slots=True)
class Workload:
    """A series of prompts.

    Args:
        name: Its name in `--workloads`.
        about: A description.
        ask: Makes the prompts: takes a tokenizer, their number and a seed.
        restarts: Whether a new process serves the later half.
    """

    name: str
    about: str
    ask: Callable[[Any, int, int], Prompts]
    restarts: bool = False


def _chat(tokenizer: Any, count: int, seed: int) -> Prompts:
    messages: list[Message] = []
    documents: list[Document] = []
    for turn, target in enumerate(CHAT_SHAPE[:count]):
        question, document = chat_turn(tokenizer, messages, documents, target, seed=1000 * seed + turn)
        documents.append(document)
        messages.append({"role": "user", "content": question.text})
        said = yield Prompt(encode(tokenizer, messages), question.fact)
        messages.append({"role": "assistant", "content": said})


def _retrieved(tokenizer: Any, count: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    library = make_documents(rng, _LIBRARY, num_words=_DOCUMENT_WORDS)
    for _ in range(count):
        left = list(enumerate(library, start=1))
        drawn: list[Document] = []
        for _ in range(NUM_DOCUMENTS):
            found = rng.choices(left, weights=[1 / rank for rank, _ in left])[0]
            left.remove(found)
            drawn.append(found[1])
        turn = Turn(tuple(rng.sample(drawn, len(drawn))), rng.choice([fact for one in drawn for fact in one.facts]))
        yield Prompt(encode(tokenizer, chat_messages([turn])), turn.fact)


def _linked(tokenizer: Any, count: int, seed: int) -> Prompts:
    yield from _alone(tokenizer, linked_documents(tokenizer, LONG_DOCUMENT_TOKENS, count, seed))


def _few_shot(tokenizer: Any, count: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    documents = make_documents(rng, _SHOTS + count, num_words=_SHOT_WORDS)
    turns = [Turn((document,), rng.choice(document.facts)) for document in documents]
    shots = turns[:_SHOTS]
    for turn in turns[_SHOTS:]:
        yield Prompt(encode(tokenizer, chat_messages([*rng.sample(shots, _SHOTS), turn])), turn.fact)


def _agent(tokenizer: Any, count: int, seed: int) -> Prompts:
    turns = make_chat(random.Random(seed), count, first_num_words=4 * _DOCUMENT_WORDS)
    said: list[str] = []
    for step in range(count):
        clock = f"2026-01-{1 + seed % 28:02d} 12:{step:02d}:{37 * step % 60:02d}"
        messages = chat_messages(turns[: step + 1], said, system=f"{clock} {SYSTEM_PROMPT}")
        said.append((yield Prompt(encode(tokenizer, messages), turns[step].fact)))


def _restart(tokenizer: Any, count: int, seed: int) -> Prompts:
    yield from _alone(tokenizer, long_document(tokenizer, LONG_DOCUMENT_TOKENS, count, seed))


def _alone(tokenizer: Any, questions: Sequence[Question]) -> Prompts:
    for question in questions:
        yield Prompt(encode(tokenizer, [{"role": "user", "content": question.text}]), question.fact)


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("chat", "a chat that grows; the answers of plain generate() go back in as text", _chat),
        Workload("rag", f"{NUM_DOCUMENTS} of {_LIBRARY} documents in any order, drawn by Zipf's law", _retrieved),
        Workload("facts", "documents whose first sentences only the document before explains", _linked),
        Workload("few-shot", f"{_SHOTS} demonstrations in any order, then a new document", _few_shot),
        Workload("agent", "a transcript that grows, below a time that changes", _agent),
        Workload("restart", "questions about one document, the later half in a new process", _restart, restarts=True),
    )
}
