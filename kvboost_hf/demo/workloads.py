"""What is asked: a chat that grows, questions about one long document, and about documents in ever other orders."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvboost_hf.assets.world import Document, Fact, make_documents

# Prompt tokens by turn of a replayed chat, as published for KVBoost's ShareGPT run.
CHAT_SHAPE = (54, 206, 371, 532, 690, 826, 964, 1114)
LONG_DOCUMENT_TOKENS = 1000
NUM_QUESTIONS = 6
NUM_DOCUMENTS = 6

Message = dict[str, str]


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
        return make_documents(random.Random(seed), 6, num_words=num_words // 6)

    def size(num_words: int) -> int:
        return len(encode(tokenizer, [{"role": "user", "content": _text(write(num_words))}]))

    documents = write(_closest(size, target_tokens))
    facts = random.Random(seed).sample([f for document in documents for f in document.facts], num_questions)
    return [Question(f"{_text(documents)}\n\n{fact.question}", fact) for fact in facts]


def shuffled_documents(
    tokenizer: PreTrainedTokenizerBase,
    target_tokens: int,
    num_questions: int,
    seed: int,
    *,
    num_documents: int = NUM_DOCUMENTS,
    num_shown: int = NUM_DOCUMENTS,
) -> list[Question]:
    """Questions about documents that come back in other orders; each is a chat of its own, documents first.

    As long as there are no more questions than documents, each prompt starts with another document.

    Args:
        tokenizer: Counts the tokens.
        target_tokens: Of a prompt, about.
        num_questions: Number of prompts.
        seed: Of documents, orders and questions.
        num_documents: How many different documents there are.
        num_shown: How many of them each prompt holds.
    """

    def write(num_words: int) -> list[Document]:
        return make_documents(random.Random(seed), num_documents, num_words=num_words // num_shown)

    def size(num_words: int) -> int:
        return len(encode(tokenizer, [{"role": "user", "content": _text(write(num_words)[:num_shown])}]))

    documents, rng = write(_closest(size, target_tokens)), random.Random(seed)
    questions: list[Question] = []
    for index in range(num_questions):
        first = documents[index % num_documents]
        others = rng.sample([document for document in documents if document is not first], num_shown - 1)
        asked = {question.fact for question in questions}
        fact = rng.choice([fact for shown in (first, *others) for fact in shown.facts if fact not in asked])
        questions.append(Question(f"{_text([first, *others])}\n\n{fact.question}", fact))
    return questions


def many_shuffled_documents(tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    """What `kvboost-hf verify` asks by default: 16 prompts, each of 6 out of 9 documents."""
    return shuffled_documents(tokenizer, LONG_DOCUMENT_TOKENS, 16, seed=1, num_documents=9)


def _text(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.text for document in documents)


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Ids of a chat up to where the answer starts; plain labels where the tokenizer has no chat template."""
    if tokenizer.chat_template is not None:
        prompt = str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        return list(tokenizer.encode(prompt, add_special_tokens=False))
    lines = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return list(tokenizer.encode("\n\n".join([*lines, "Assistant:"])))


def _closest(size: Callable[[int], int], target: int) -> int:
    """The number of words, in steps of 8, whose prompt is closest to `target` tokens; `size` grows with it."""
    low, high = 1, 2
    while size(8 * high) < target and high < 1024:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(8 * middle) < target else (low, middle)
    return 8 * min((low, high), key=lambda n: abs(size(8 * n) - target))
