"""Prompts about documents that a store has seen in earlier prompts, in other orders and choices."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.leaderboard.facts import draw_facts
from kvboost_hf.assets.texts import Count, encode, prose, source
from kvboost_hf.assets.world import make_documents

_SYSTEM = "You are a careful assistant. You answer from the documents that you are given, in a few sentences."
_QUESTIONS = (
    "Summarize the most important points of these documents.",
    "Explain the third document in your own words.",
    "Which of these documents defines something, and what does it define?",
    "What should a programmer remember of these documents?",
    "Quote one important sentence of these documents, and explain it.",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that is measured.

    Args:
        ids: The tokens of the prompt.
        truth: Words that a right answer holds; None where that is not known.
        answer: Tokens that are fed behind it; None for those that plain generate() gives.
    """

    ids: list[int]
    truth: str | None = None
    answer: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """What a store has seen, and questions about it.

    Args:
        asked: The questions.
        seen: Token ids of the earlier prompts.
        documents: Texts that were stored each alone, in place of earlier prompts.
        prefix: What stood before each of those.
    """

    asked: list[Question]
    seen: list[list[int]] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    prefix: str = ""


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]


def prompt_of(tokenizer: Any, documents: Sequence[str], question: str) -> list[int]:
    """Token ids of a chat that asks about documents."""
    text = "".join(f"Document:\n{document}\n\n" for document in documents)
    return encode(tokenizer, _chat(f"{text}Question: {question}"))


@dataclass(frozen=True, slots=True)
class Pool:
    """Documents of one kind, of which each prompt has some.

    Args:
        title: The title of the prompts; also the seed.
        text: Makes documents, with their tokens, a counter and a seed.
        tokens: At most, of a document.
        documents: How many there are.
        take: How many of them are in a prompt.
    """

    title: str
    text: Callable[[int, Count, int], list[str]]
    tokens: int
    documents: int
    take: int

    def drawn(self, tokenizer: Any, seed: int) -> list[str]:
        """The documents."""
        return self.text(self.tokens, lambda text: len(tokenizer(text).input_ids), seed)[: self.documents]

    def __call__(self, tokenizer: Any, seed: int, asked: int) -> Case:
        """Questions about documents that four earlier prompts had in other orders."""
        documents = self.drawn(tokenizer, seed)
        chance = random.Random(f"{self.title}/{seed}")
        seen: list[list[int]] = []
        known: set[int] = set()
        for _ in range(4):
            order = chance.sample(range(len(documents)), self.take)
            known |= set(order)
            seen.append(prompt_of(tokenizer, [documents[i] for i in order], chance.choice(_QUESTIONS)))
        wanted = [chance.sample(sorted(known), self.take) for _ in range(asked)]
        prompts = [prompt_of(tokenizer, [documents[i] for i in order], chance.choice(_QUESTIONS)) for order in wanted]
        return Case([Question(ids) for ids in prompts], seen)

    def alone(self, tokenizer: Any, seed: int, asked: int) -> Case:
        """The same questions about documents that were stored each alone."""
        mark = "the first document"
        chat = _chat(f"Document:\n{mark}")
        prefix = tokenizer.apply_chat_template(chat, tokenize=False).partition(mark)[0]
        return Case(self(tokenizer, seed, asked).asked, documents=self.drawn(tokenizer, seed), prefix=prefix)


def linked(tokenizer: Any, seed: int | str, asked: int, count: int = 10) -> Case:
    """Documents of which each but the first begins with a pronoun for the last subject of the one before."""
    chance = random.Random(f"{LINKED}/{seed}")
    made = make_documents(chance, count, num_words=80, pronoun_start=True)
    texts = [document.text for document in made]
    facts = [fact for document in made for fact in document.facts]
    seen = []
    for _ in range(2):
        order = chance.sample(range(count), count)
        seen.append(prompt_of(tokenizer, [texts[i] for i in order], chance.choice(facts).question))
    wanted = chance.sample(facts, asked)
    return Case([Question(prompt_of(tokenizer, texts, fact.question), fact.value) for fact in wanted], seen)


def facts(tokenizer: Any, seed: int, asked: int) -> Case:
    """Questions whose answers are known, every other one about a pronoun at the start of a document."""
    drawn = draw_facts(f"leaderboard/{seed}", 10, -(-asked // 2))
    pairs = [fact for pair in zip(drawn.starts, drawn.others, strict=True) for fact in pair][:asked]

    def question(fact: Any) -> Question:
        answer = [*tokenizer.encode(fact.answer, add_special_tokens=False), tokenizer.eos_token_id]
        return Question(drawn.ids(tokenizer, fact), fact.answer, answer)

    return Case([question(fact) for fact in pairs], [drawn.seen_ids(tokenizer)])


class Workload(NamedTuple):
    """A kind of prompts."""

    title: str
    about: str
    draw: Callable[[Any, int, int], Case]  # with a tokenizer, a seed and a number of questions


LINKED = "ten linked documents of 110 tokens"
NOTES = Pool("six notes of 220 tokens", prose, 220, 12, 6)
CHAPTERS = Pool("four chapters of 600 tokens", prose, 600, 8, 4)
SOURCES = Pool("five source files of 280 tokens", source, 280, 9, 5)
WORKLOADS: dict[str, Workload] = {
    "notes": Workload(NOTES.title, "six of twelve, which four earlier prompts had in other orders and choices", NOTES),
    "alone": Workload(f"{NOTES.title}, stored alone", "each was computed behind the system prompt alone", NOTES.alone),
    "chapters": Workload(
        CHAPTERS.title, "four of eight, which four earlier prompts had in other orders and choices", CHAPTERS
    ),
    "sources": Workload(SOURCES.title, "five of nine, which four earlier prompts had in other choices", SOURCES),
    "linked": Workload(LINKED, "each begins with a sentence about the last subject of the one before", linked),
    "facts": Workload("ten linked documents, known answers", "every other question is about such a sentence", facts),
}
OF_READER, OF_OTHERS = (
    ("facts",),
    ("notes", "alone", "chapters", "sources", "linked"),
)  # it knows a made-up world alone
