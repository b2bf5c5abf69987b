"""Series of prompts: a growing chat, questions about one long document, and about documents in changing orders.

On the text of the embedded model the right answers are known. On real text, for any model, they are not; that text is
the language reference and the standard library of Python, as they are installed. Roles are those of user and assistant
alone, in turn, which every chat template takes.
"""

import json
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from kvboost_hf.assets.texts import ChatMessage, encode, prose, source
from kvboost_hf.assets.world import ATTRIBUTES, Document, Fact, make_documents

# Prompt tokens by turn of a replayed chat, as published for KVBoost's ShareGPT run.
CHAT_SHAPE = (54, 206, 371, 532, 690, 826, 964, 1114)
LONG_DOCUMENT_TOKENS = 1000
NUM_DOCUMENTS = 6
# Tokens of the context, without those of answers. In a smaller one than the last, texts are shorter in proportion.
_LEAST, _LEAST_FOR_AGENT, _FULL = 512, 1536, 3600
_AGENT_TASK_TOKENS = 800  # at most; the task cannot be cut
_PASSAGE_TOKENS, _DOCUMENT_TOKENS, _NOTE_TOKENS, _RESULT_TOKENS = 190, 1500, 240, 380
_NOTES, _MOST_ANSWERS = 6, 8
_TURNS = (
    "Explain this passage of the Python reference in simple words.",
    "Thanks. What does this one say?",
    "And this? Which rule does it give?",
    "What follows from this for a beginner?",
    "Here is another. Summarize it in one sentence.",
    "How does this go with what we read before?",
    "Which words of this passage need an explanation?",
    "One more: what is its main point?",
)
_QUESTIONS = (
    "Summarize the text above in one sentence.",
    "Which terms does the text above define?",
    "Write a title for the text above.",
    "What must a programmer remember of the text above?",
    "Give one example of what the text above describes.",
    "For whom is the text above written?",
    "Which part of the text above is the hardest to understand?",
    "What does the text above not explain?",
)
_TOOLS = (
    ("list_files", "List the files of a folder.", {"folder": "string"}),
    ("read_file", "Read a file, or the lines of it from `first` to `last`.", {"path": "string", "first": "integer"}),
    ("search", "Find the lines that match a regular expression.", {"pattern": "string", "folder": "string"}),
    ("run_tests", "Run the tests of a folder, and return what they print.", {"folder": "string"}),
    ("write_note", "Keep a note for later.", {"text": "string"}),
)
_TASK = (
    "You are an agent that works on a Python project. In each step, think in one sentence, and call one tool as JSON, "
    'such as {{"tool": "read_file", "arguments": {{"path": "heapq.py"}}}}. The result comes back in the next message. '
    "The tools:\n{tools}\n\nThe task: find out what each module of the folder does, and which of them a newcomer "
    "should read first."
)


@dataclass(frozen=True, slots=True)
class Question:
    """A user's message, and the fact that answers it."""

    text: str
    fact: Fact


def chat_turn(
    tokenizer: PreTrainedTokenizerBase,
    history: Sequence[ChatMessage],
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


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """One prompt of a series."""

    ids: list[int]  # the token ids of the prompt
    question: str  # what it asks, as a person reads it
    value: str | None = None  # what a right answer contains; None where that is unknown
    answer: str | None = None  # the whole right answer; None where that is unknown


Prompts = Generator[AskedPrompt, str, None]  # is sent the text of plain generate()'s answer


@dataclass(frozen=True, slots=True)
class Workload:
    """A series of prompts."""

    name: str  # the workload's name on the command line
    about: str  # a description
    ask: Callable[[Any, int, int], Prompts]  # makes the prompts: takes a tokenizer, their number and a seed
    restarts: bool = False  # whether a new process serves the later half

    def play(self, tokenizer: Any, count: int, seed: int, answer: Callable[[int, AskedPrompt], str]) -> None:
        """Ask all prompts, in their order: a chat goes on from the answers.

        Args:
            tokenizer: The tokenizer of the model.
            count: How many prompts.
            seed: The seed of the texts.
            answer: Called with the index of each prompt and with itself; returns the text of its answer.
        """
        asking = self.ask(tokenizer, count, seed)
        said: str | None = None
        for index in range(count):
            said = answer(index, next(asking) if said is None else asking.send(said))


def own_prompts(prompts: Sequence[Any]) -> Workload:
    """Prompts of one's own, in their order.

    Args:
        prompts: Texts, which are taken as they are, or lists of messages, which go through the chat template.

    Raises:
        ValueError: there are none, or one is neither.
    """
    is_chat = [
        isinstance(each, list) and all(isinstance(said, dict) and "content" in said for said in each)
        for each in prompts
    ]
    for each, chat in zip(prompts, is_chat, strict=True):
        if not each or not (chat or isinstance(each, str)):
            raise ValueError(f"A prompt must be a text or a list of messages with role and content, got {each!r:.60}.")
    if not prompts:
        raise ValueError("There must be at least one prompt, got none. Write a prompt on each line.")

    def ask(tokenizer: Any, count: int, seed: int) -> Prompts:
        for each, chat in zip(prompts[:count], is_chat, strict=False):
            ids = encode(tokenizer, each) if chat else list(tokenizer(each)["input_ids"])
            yield AskedPrompt(ids, str(each[-1]["content"] if chat else each)[-80:])

    return Workload("prompts", "your prompts, in their order", ask)


def chat(tokenizer: Any, count: int, seed: int) -> Prompts:
    """A chat of at most 8 turns, whose prompts grow as in `CHAT_SHAPE`."""
    messages: list[ChatMessage] = []
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


def asked(tokenizer: Any, messages: Sequence[ChatMessage], question: Question) -> AskedPrompt:
    """The prompt of a chat that ends with a question."""
    fact = question.fact
    return AskedPrompt(encode(tokenizer, messages), fact.question, fact.value, fact.answer)


CHAT = Workload("chat", "a chat that grows; the answers of plain generate() go back in as text", chat)
DOCUMENT = Workload("document", "questions about one long document", document)
SHUFFLED = Workload("shuffled", "the same documents in another order for each question", shuffled)


def workloads_for(config: PretrainedConfig, max_new_tokens: int) -> dict[str, Workload]:
    """The workloads by name, in sizes that fit into a model's context.

    Args:
        config: The configuration of the model.
        max_new_tokens: Length of an answer; those of a chat go back in.

    Returns:
        Without the agent's transcript, where the context is too short for it.

    Raises:
        ValueError: the context is too short.
    """
    answers = _MOST_ANSWERS * max_new_tokens
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or _FULL + answers
    if longest - answers < _LEAST:
        raise ValueError(
            f"The model must take {_LEAST} tokens and {_MOST_ANSWERS} answers of {max_new_tokens}, but it takes "
            f"{longest} tokens. Pass a smaller `--max-new-tokens`, or name another model."
        )
    text = _RealText(longest - answers)
    found = {
        workload.name: workload
        for workload in (
            Workload("chat", "a chat that grows by a passage each turn; the answers go back in as text", text.chat),
            Workload("document", "questions about one long document", text.document),
            Workload("shuffled", "the same notes in another order for each question", text.shuffled),
            Workload("agent", "an agent's transcript, which grows by an answer and a tool's result", text.agent),
            Workload("restart", "questions about one document, the later half in a new process", text.document, True),
        )
    }
    if text.room < _LEAST_FOR_AGENT:
        del found["agent"]
    return found


@dataclass(frozen=True, slots=True)
class _RealText:
    room: int  # tokens for all but answers

    @property
    def scale(self) -> float:
        """Of the sizes of texts."""
        return min(1.0, self.room / _FULL)

    def chat(self, tokenizer: Any, count: int, seed: int) -> Prompts:
        passages = self._prose(tokenizer, _PASSAGE_TOKENS, seed)
        messages: list[ChatMessage] = []
        for turn in range(count):
            messages.append({"role": "user", "content": f"{_TURNS[turn]}\n\n{passages[turn]}"})
            said = yield AskedPrompt(encode(tokenizer, messages), _TURNS[turn])
            messages.append({"role": "assistant", "content": said})

    def document(self, tokenizer: Any, count: int, seed: int) -> Prompts:
        text = max(self._prose(tokenizer, _DOCUMENT_TOKENS, seed)[:8], key=len)
        for question in _QUESTIONS[:count]:
            yield self._alone(tokenizer, text, question)

    def shuffled(self, tokenizer: Any, count: int, seed: int) -> Prompts:
        notes, rng = self._prose(tokenizer, _NOTE_TOKENS, seed)[:_NOTES], random.Random(seed)
        for at, question in enumerate(_QUESTIONS[:count]):
            first = notes[at % _NOTES]  # another one in each prompt, so that prompts share no beginning
            shown = [first, *rng.sample([note for note in notes if note is not first], _NOTES - 1)]
            yield self._alone(tokenizer, "\n\n".join(shown), question)

    def agent(self, tokenizer: Any, count: int, seed: int) -> Prompts:
        scale = min(1.0, (self.room - _AGENT_TASK_TOKENS) / (_FULL - _AGENT_TASK_TOKENS))
        files = source(int(scale * _RESULT_TOKENS), partial(_count, tokenizer), seed)
        tools = "\n".join(
            json.dumps({"name": name, "description": about, "arguments": arguments})
            for name, about, arguments in _TOOLS
        )
        messages: list[ChatMessage] = [{"role": "user", "content": _TASK.format(tools=tools)}]
        for step in range(count):
            name = files[step].partition("\n")[0].removeprefix("# ")
            said = yield AskedPrompt(encode(tokenizer, messages), f"what to do, step {step + 1}")
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": f"Result of read_file, {name}:\n{files[step]}"})

    def _prose(self, tokenizer: Any, tokens: int, seed: int) -> list[str]:
        return prose(int(self.scale * tokens), partial(_count, tokenizer), seed)

    @staticmethod
    def _alone(tokenizer: Any, text: str, question: str) -> AskedPrompt:
        return AskedPrompt(encode(tokenizer, [{"role": "user", "content": f"{text}\n\n{question}"}]), question)


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))
