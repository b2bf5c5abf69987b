"""Makes prompts: a growing chat, questions about one long document, and about documents in changing orders."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from kvboost_hf.assets.chat import Message, encode
from kvboost_hf.assets.world import ATTRIBUTES, Document, Fact, make_documents

# Prompt tokens by turn of a replayed chat, as published for KVBoost's ShareGPT run.
CHAT_SHAPE = (54, 206, 371, 532, 690, 826, 964, 1114)
LONG_DOCUMENT_TOKENS = 1000
NUM_DOCUMENTS = 6


@dataclass(frozen=True, slots=True)
class Question:
    """A user's message, and the fact that answers it."""

    text: str
    fact: Fact


def chat_turn(
    tokenizer: PreTrainedTokenizerBase,
    history: Sequence[Message],
    documents: Sequence[Document],
    target_tokens: int,
    seed: int,
) -> tuple[Question, Document]:
    """The next message of a chat: a document that brings the prompt to about `target_tokens`, and a question.

    Every other question is about a document of an earlier turn.
    """
    told = {fact.subject for document in documents for fact in document.facts}

    def write(num_words: int) -> tuple[Question, Document]:
        rng = random.Random(seed)
        document = make_documents(rng, 1, num_words=num_words, exclude=told)[0]
        earlier = [fact for past in documents for fact in past.facts]
        fact = rng.choice(earlier if earlier and len(documents) % 2 else document.facts)
        return Question(f"{document.text}\n\n{fact.question}", fact), document

    def size(num_words: int) -> int:
        message = {"role": "user", "content": write(num_words)[0].text}
        return len(encode(tokenizer, [*history, message]))

    return write(_closest(size, target_tokens))


def long_document(
    tokenizer: PreTrainedTokenizerBase, target_tokens: int, num_questions: int, seed: int
) -> list[Question]:
    """Questions about one document of about `target_tokens`; each is a chat of its own, document first."""

    def write(num_words: int) -> list[Document]:
        return make_documents(random.Random(seed), NUM_DOCUMENTS, num_words=num_words // NUM_DOCUMENTS)

    documents = write(_words_for(tokenizer, write, target_tokens))
    facts = random.Random(seed).sample([f for document in documents for f in document.facts], num_questions)
    return [Question(f"{_text(documents)}\n\n{fact.question}", fact) for fact in facts]


def shuffled_documents(
    tokenizer: PreTrainedTokenizerBase, target_tokens: int, num_questions: int, seed: int
) -> list[Question]:
    """Questions about the same documents in other orders; each is a chat of its own, documents first.

    As long as there are no more questions than documents, each prompt starts with another document.
    """

    def write(num_words: int) -> list[Document]:
        return make_documents(random.Random(seed), NUM_DOCUMENTS, num_words=num_words // NUM_DOCUMENTS)

    documents, rng = write(_words_for(tokenizer, write, target_tokens)), random.Random(seed)
    questions: list[Question] = []
    for index in range(num_questions):
        shown = _shuffled(rng, documents, index, NUM_DOCUMENTS)
        questions.append(_ask(rng, shown, [fact for document in shown for fact in document.facts], questions))
    return questions


def linked_documents(
    tokenizer: PreTrainedTokenizerBase, target_tokens: int, num_questions: int, seed: int
) -> list[Question]:
    """As `shuffled_documents`, with 6 out of 9 documents in each prompt, which begin with "It".

    The document before tells what "it" is, and is another one in each prompt: K/V that moves with its document refers
    to a wrong subject. Every other question is about such a fact.
    """

    def write(num_words: int) -> list[Document]:
        return _starting_with_it(random.Random(seed), 3 * NUM_DOCUMENTS // 2, num_words // NUM_DOCUMENTS)

    documents, rng = write(_words_for(tokenizer, write, target_tokens)), random.Random(seed)
    questions: list[Question] = []
    for index in range(num_questions):
        shown = _shuffled(rng, documents, index, NUM_DOCUMENTS)
        across = [fact for pair in pairwise(shown) if (fact := _fact_across(*pair)) is not None]
        within = [fact for document in shown for fact in document.facts if fact not in document.facts[:2]]
        questions.append(_ask(rng, shown, across if index % 2 and across else within, questions))
    return questions


def _shuffled(rng: random.Random, documents: Sequence[Document], index: int, count: int) -> list[Document]:
    first = documents[index % len(documents)]
    return [first, *rng.sample([document for document in documents if document is not first], count - 1)]


def _ask(
    rng: random.Random, shown: Sequence[Document], facts: Sequence[Fact], earlier: Sequence[Question]
) -> Question:
    """A question after documents; one that was not asked before, if there is one."""
    asked = {question.fact for question in earlier}
    fact = rng.choice([fact for fact in facts if fact not in asked] or facts)
    return Question(f"{_text(shown)}\n\n{fact.question}", fact)


def _starting_with_it(rng: random.Random, count: int, num_words: int) -> list[Document]:
    """Documents that go on about an object, whichever stands before them, and that end with one."""
    documents: list[Document] = []
    told: set[str] = set()
    while len(documents) < count:
        _, document = make_documents(rng, 2, num_words=num_words, pronoun_start=True, exclude=told)
        if document.text.startswith("It ") and document.facts[-1].subject.startswith("the "):
            documents.append(document)
            told |= {fact.subject for fact in document.facts}
    return documents


def _fact_across(before: Document, document: Document) -> Fact | None:
    """The first fact of `document`, about the last subject of `before`; None if `before` tells it, too."""
    subject, told = before.facts[-1].subject, document.facts[0]
    if any(fact.subject == subject and fact.attribute == told.attribute for fact in before.facts):
        return None
    predicate = ATTRIBUTES[told.attribute].predicate.format(told.value)
    question = ATTRIBUTES[told.attribute].question.format(subject)
    return Fact(subject, told.attribute, told.value, question, f"T{subject[1:]} {predicate}.", pronoun=True)


def _words_for(
    tokenizer: PreTrainedTokenizerBase, write: Callable[[int], Sequence[Document]], target_tokens: int
) -> int:
    """Words whose first `NUM_DOCUMENTS` documents make a prompt of about `target_tokens`."""

    def size(num_words: int) -> int:
        return len(encode(tokenizer, [{"role": "user", "content": _text(write(num_words)[:NUM_DOCUMENTS])}]))

    return _closest(size, target_tokens)


def _text(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.text for document in documents)


def _closest(size: Callable[[int], int], target: int) -> int:
    """The number of words, in steps of 8, whose prompt is closest to `target` tokens; `size` grows with it."""
    low, high = 1, 2
    while size(8 * high) < target and high < 1024:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(8 * middle) < target else (low, middle)
    return 8 * min((low, high), key=lambda n: abs(size(8 * n) - target))
