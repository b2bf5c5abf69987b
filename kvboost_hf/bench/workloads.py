"""The workloads of the benchmark."""

import random
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig

from kvboost_hf import choices
from kvboost_hf.assets.texts import ChatMessage, encode
from kvboost_hf.assets.world import SYSTEM_PROMPT, ChatTurn, Document, chat_messages, make_chat, make_documents
from kvboost_hf.bench.models import ModelOrigin
from kvboost_hf.bench.prompts import (
    CHAT,
    LONG_DOCUMENT_TOKENS,
    NUM_DOCUMENTS,
    AskedPrompt,
    Prompts,
    Workload,
    alone,
    document,
    linked_documents,
    workloads_for,
)
from kvboost_hf.compat import naming

_LIBRARY = 3 * NUM_DOCUMENTS  # documents to retrieve from
_DOCUMENT_WORDS = LONG_DOCUMENT_TOKENS // NUM_DOCUMENTS
_SHOTS, _SHOT_WORDS = 12, 64


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
        turn = ChatTurn(
            tuple(rng.sample(drawn, len(drawn))), rng.choice([fact for one in drawn for fact in one.facts])
        )
        yield _turn(tokenizer, chat_messages([turn]), turn)


def _linked(tokenizer: Any, count: int, seed: int) -> Prompts:
    yield from alone(tokenizer, linked_documents(tokenizer, LONG_DOCUMENT_TOKENS, count, seed))


def _few_shot(tokenizer: Any, count: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    documents = make_documents(rng, _SHOTS + count, num_words=_SHOT_WORDS)
    turns = [ChatTurn((document,), rng.choice(document.facts)) for document in documents]
    shots = turns[:_SHOTS]
    for turn in turns[_SHOTS:]:
        yield _turn(tokenizer, chat_messages([*rng.sample(shots, _SHOTS), turn]), turn)


def _agent(tokenizer: Any, count: int, seed: int) -> Prompts:
    turns = make_chat(random.Random(seed), count, first_num_words=4 * _DOCUMENT_WORDS)
    said: list[str] = []
    for step in range(count):
        clock = f"2026-01-{1 + seed % 28:02d} 12:{step:02d}:{37 * step % 60:02d}"
        messages = chat_messages(turns[: step + 1], said, system=f"{clock} {SYSTEM_PROMPT}")
        said.append((yield _turn(tokenizer, messages, turns[step])))


def _turn(tokenizer: Any, messages: Sequence[ChatMessage], turn: ChatTurn) -> AskedPrompt:
    return AskedPrompt(encode(tokenizer, messages), turn.fact.question, turn.fact.value, turn.fact.answer)


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        CHAT,
        Workload("rag", f"{NUM_DOCUMENTS} of {_LIBRARY} documents in any order, drawn by Zipf's law", _retrieved),
        Workload("facts", "documents whose first sentences only the document before explains", _linked),
        Workload("few-shot", f"{_SHOTS} demonstrations in any order, then a new document", _few_shot),
        Workload("agent", "a transcript that grows, below a time that changes", _agent),
        Workload("restart", "questions about one document, the later half in a new process", document, restarts=True),
    )
}
assert tuple(WORKLOADS) == choices.WORKLOADS, "flags take the names in choices"


def workloads_of(source: ModelOrigin, max_new_tokens: int) -> dict[str, Workload]:
    """The workloads for a model, by name: real text for one that is named, else the text of the embedded model.

    Args:
        source: The source of the model.
        max_new_tokens: Length of an answer.

    Raises:
        ValueError: there is no such model, or its context is too short.
    """
    if source.name is None:
        return WORKLOADS
    with naming(source.name):
        config = AutoConfig.from_pretrained(source.name)
    real = workloads_for(config, max_new_tokens)
    return {name: real[name] for name in choices.REAL_WORKLOADS if name in real}
