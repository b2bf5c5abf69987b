"""Makes documents and questions in templated English, for the embedded reader to answer.

Everything is drawn from the :class:`random.Random` that the caller passes: the same seed gives the same documents. A
document is a paragraph of short sentences. Each sentence states one fact about one subject (a person or an object)
and about a third of them name their subject by pronoun only ("It", "She", "He"), which always refers to the subject
of the sentence before. So the text of a document read alone is enough to answer about it, unless it was made with
``pronoun_start=True``: then the subject of its first sentences is named only at the end of the document before.

Example:
    >>> import random
    >>> document = make_documents(random.Random(24), 1, num_words=20)[0]
    >>> print(document.text)
    The letter is brown. The letter weighs ten pounds. It stands in the library. Noah wears a pink cap.
    >>> document.facts[2].question, document.facts[2].answer, document.facts[2].pronoun
    ('Where is the letter?', 'The letter stands in the library.', True)
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

SYSTEM_PROMPT = "You read documents and answer questions about them."

FEMALE_NAMES: tuple[str, ...] = tuple(
    "Anna Mary Emma Lisa Nina Sara Julia Clara Laura Eva Ruth Rosa Lucy Ella Maria Helen Alice Jane Kate Nora "
    "Olga Vera Irene Diana Grace Linda Paula Marta Greta Ida Lena Mona Tina Zoe Amy Beth Carla Dora Edith Fay "
    "Gina Hanna Iris Jill Kim Leah May Nancy Pam Rita Sofia Tess Ursula Vivian Wendy Yoko Joan Karen Sue Dina".split()
)
MALE_NAMES: tuple[str, ...] = tuple(
    "Ben Tom John Paul Mark David Peter Adam Carl Eric Frank George Henry Ivan Jack Kevin Leo Max Nick Oscar "
    "Rob Sam Tim Victor Walter Alan Bob Chris Dan Ed Fred Gary Hugo Ian Joe Karl Luis Mike Noah Otto "
    "Phil Ralph Simon Ted Umar Vince Will Yuri Zack Andy Bruno Cole Dean Emil Felix Glen Hans Jim Kurt Lars".split()
)
OBJECTS: tuple[str, ...] = tuple(
    "lamp table chair box clock cup bowl vase desk bench bed shelf mirror carpet basket bottle plate spoon fork knife "
    "kettle pan pot jar bag coat scarf glove shoe boot belt ring crown mask brush comb broom bucket ladder hammer "
    "saw nail rope chain lock key door gate window curtain pillow blanket towel candle stove oven fan radio camera "
    "phone book map letter stamp pen pencil paper folder drum flute harp bell kite ball doll puzzle sled "
    "bike cart wagon boat canoe tent flag shield sword bow arrow net hook wheel tire engine pump pipe "
    "barrel crate trunk chest safe coin medal statue globe compass watch ruler scale magnet lens tray stool "
    "sofa".split()
)
COLOURS: tuple[str, ...] = tuple("red blue green black white brown gray pink gold silver yellow purple".split())
PLACES: tuple[str, ...] = tuple(
    "kitchen garden garage attic cellar hall office library barn shop school museum church tower station hotel "
    "park yard cabin castle theater bank market bakery".split()
)
MATERIALS: tuple[str, ...] = tuple(
    "wood glass steel iron stone paper clay leather wool silk cotton brass copper plastic rubber bone".split()
)
NUMBERS: tuple[str, ...] = tuple(
    "two three four five six seven eight nine ten twelve fifteen twenty thirty forty fifty sixty".split()
)
CITIES: tuple[str, ...] = tuple(
    "Oslo Paris Rome London Berlin Madrid Vienna Lisbon Dublin Athens Cairo Delhi Tokyo Lima Quito Havana "
    "Boston Chicago Dallas Denver Miami Prague Warsaw Milan".split()
)
JOBS: tuple[str, ...] = tuple(
    "baker teacher doctor nurse farmer pilot driver painter singer dancer lawyer judge cook tailor writer "
    "miner sailor guard clerk banker plumber hunter gardener builder".split()
)
FOODS: tuple[str, ...] = tuple(
    "soup bread cheese rice fish corn cake honey pasta salad pizza beans nuts plums pears grapes".split()
)
INSTRUMENTS: tuple[str, ...] = tuple("piano violin guitar cello trumpet organ banjo tuba".split())
PETS: tuple[str, ...] = tuple("cats dogs birds goats horses ducks".split())
GARMENTS: tuple[str, ...] = tuple("hat shirt dress jacket cap tie".split())


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact of one sentence, with the question that asks for it.

    Attributes:
        subject: What the fact is about as a sentence names it: ``"Anna"`` or ``"the lamp"``.
        attribute: Key of the fact among its subject's, such as ``"colour"``.
        value: The words that only the document gives, such as ``"red"`` or ``"seven cats"``.
        question: A question that names the subject.
        answer: The one right answer, a full sentence that names the subject.
        pronoun: Whether the document names the subject of this fact's sentence by pronoun only.
    """

    subject: str
    attribute: str
    value: str
    question: str
    answer: str
    pronoun: bool


@dataclass(frozen=True, slots=True)
class Document:
    """A paragraph and its facts, one for each sentence, in the order of the sentences."""

    text: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Attribute:
    """How a kind of fact is told and asked for."""

    predicate: str  # what follows the subject in a sentence; {} takes the value
    question: str  # {} takes the subject


_OBJECT_ATTRIBUTES: Mapping[str, Attribute] = {
    "colour": Attribute("is {}", "What colour is {}?"),
    "place": Attribute("stands in the {}", "Where is {}?"),
    "material": Attribute("is made of {}", "What is {} made of?"),
    "owner": Attribute("belongs to {}", "Who owns {}?"),
    "price": Attribute("costs {} coins", "How much does {} cost?"),
    "weight": Attribute("weighs {} pounds", "How heavy is {}?"),
    "origin": Attribute("comes from {}", "Where does {} come from?"),
}
_PERSON_ATTRIBUTES: Mapping[str, Attribute] = {
    "home": Attribute("lives in {}", "Where does {} live?"),
    "job": Attribute("works as a {}", "What does {} work as?"),
    "pets": Attribute("has {}", "How many pets does {} have?"),
    "food": Attribute("likes {}", "What does {} like?"),
    "instrument": Attribute("plays the {}", "What does {} play?"),
    "clothes": Attribute("wears a {}", "What does {} wear?"),
    "friend": Attribute("knows {}", "Who does {} know?"),
}
ATTRIBUTES: Mapping[str, Attribute] = {**_OBJECT_ATTRIBUTES, **_PERSON_ATTRIBUTES}
_VALUES: Mapping[str, tuple[str, ...]] = {
    "colour": COLOURS,
    "place": PLACES,
    "material": MATERIALS,
    "owner": FEMALE_NAMES + MALE_NAMES,
    "price": NUMBERS,
    "weight": NUMBERS,
    "origin": CITIES,
    "home": CITIES,
    "job": JOBS,
    "food": FOODS,
    "instrument": INSTRUMENTS,
    "friend": FEMALE_NAMES + MALE_NAMES,
}
VALUE_POOLS: tuple[tuple[str, ...], ...] = (*_VALUES.values(), PETS, GARMENTS)
_WORDS_PER_SENTENCE = 5.4  # mean over the templates, the full stop counted
_EARLIER_SHARE = 0.5  # of the turns after the first ask about a document of an earlier one
_SECOND_RUN_SHARE = 0.5  # of the subjects are spoken of in two places of their document
_FACTS_PER_SUBJECT = (3, 4, 5)
# A run is what a document says about a subject at one go; every sentence of it but the first may use the pronoun.
_FACTS_PER_RUN = 4 / (1 + _SECOND_RUN_SHARE)


@dataclass(frozen=True, slots=True)
class _Subject:
    name: str
    pronoun: str

    @property
    def attributes(self) -> Mapping[str, Attribute]:
        return _OBJECT_ATTRIBUTES if self.pronoun == "It" else _PERSON_ATTRIBUTES


@dataclass(frozen=True, slots=True)
class _Run:
    subject: _Subject
    attributes: tuple[str, ...]
    unnamed: bool = False  # whether even its first sentence has the pronoun


_SUBJECTS: tuple[_Subject, ...] = (
    *(_Subject(name, "She") for name in FEMALE_NAMES),
    *(_Subject(name, "He") for name in MALE_NAMES),
    *(_Subject(f"the {name}", "It") for name in OBJECTS),
)
MAX_SUBJECTS = len(_SUBJECTS)


def make_documents(
    rng: random.Random,
    count: int,
    *,
    num_words: int = 128,
    pronoun_share: float = 1 / 3,
    pronoun_start: bool = False,
    exclude: Collection[str] = (),
) -> list[Document]:
    """Makes documents whose subjects all differ, so that a question about one of them has one answer.

    Args:
        rng: Source of every choice.
        count: Number of documents.
        num_words: Wanted length of a document in words and full stops, each of which is one token of the embedded
            tokenizer; documents differ from it by a sentence or two.
        pronoun_share: Wanted share of the sentences that name their subject by pronoun only, in [0, 0.6].
        pronoun_start: Whether each document but the first starts with one or two facts about the last subject of the
            document before, by pronoun only. Such documents make sense only in the order of the list.
        exclude: Subjects (see :class:`Fact`) that the documents must not be about, such as those of earlier
            documents of the same prompt.

    Returns:
        `count` documents.

    Raises:
        ValueError: If an argument is out of range, or `MAX_SUBJECTS` less the excluded are too few: a document of
            128 words is about 5 or 6 subjects.
    """
    if count < 0:
        raise ValueError(f"`count` must be at least 0, got {count}.")
    if num_words < 1:
        raise ValueError(f"`num_words` must be positive, got {num_words}.")
    if not 0 <= pronoun_share <= 0.6:
        raise ValueError(f"`pronoun_share` must be in [0, 0.6], got {pronoun_share}.")
    pool = [subject for subject in _SUBJECTS if subject.name not in exclude]
    rng.shuffle(pool)
    pronoun_chance = pronoun_share / (1 - 1 / _FACTS_PER_RUN)
    documents: list[Document] = []
    carried: _Run | None = None
    for _ in range(count):
        runs = _plan_runs(rng, pool, max(1, round(num_words / _WORDS_PER_SENTENCE)), carried)
        documents.append(_write(rng, runs, pronoun_chance))
        if pronoun_start:
            carried = _carry(rng, runs)
    return documents


def _plan_runs(rng: random.Random, pool: list[_Subject], num_sentences: int, carried: _Run | None) -> list[_Run]:
    """Decides what a document says about whom, taking its subjects out of `pool`."""
    num_left = num_sentences - (len(carried.attributes) if carried else 0)
    runs: list[_Run] = []
    while num_left > 0 or not runs:
        if not pool:
            raise ValueError(f"too many documents: there are only {MAX_SUBJECTS} subjects, less those in `exclude`.")
        subject = pool.pop()
        num_facts = min(rng.choice(_FACTS_PER_SUBJECT), max(num_left, 1))
        attributes = tuple(rng.sample(list(subject.attributes), num_facts))
        if num_facts > 1 and rng.random() < _SECOND_RUN_SHARE:
            cut = rng.randrange(1, num_facts)
            runs += [_Run(subject, attributes[:cut]), _Run(subject, attributes[cut:])]
        else:
            runs.append(_Run(subject, attributes))
        num_left -= num_facts
    rng.shuffle(runs)
    return [carried, *runs] if carried else runs


def _carry(rng: random.Random, runs: Sequence[_Run]) -> _Run:
    """Plans how the next document goes on about the last subject of this one."""
    subject = runs[-1].subject
    told = {attribute for run in runs if run.subject is subject for attribute in run.attributes}
    untold = [attribute for attribute in subject.attributes if attribute not in told]
    return _Run(subject, tuple(rng.sample(untold, rng.choice((1, 2)))), unnamed=True)


def _write(rng: random.Random, runs: Sequence[_Run], pronoun_chance: float) -> Document:
    sentences: list[str] = []
    facts: list[Fact] = []
    for run in runs:
        for position, key in enumerate(run.attributes):
            attribute = run.subject.attributes[key]
            value = _draw_value(rng, key, run.subject)
            predicate = attribute.predicate.format(value)
            pronoun = run.unnamed or (position > 0 and rng.random() < pronoun_chance)
            name = run.subject.name
            sentences.append(f"{run.subject.pronoun if pronoun else _capitalized(name)} {predicate}.")
            answer = f"{_capitalized(name)} {predicate}."
            facts.append(Fact(name, key, value, attribute.question.format(name), answer, pronoun))
    return Document(" ".join(sentences), tuple(facts))


def _draw_value(rng: random.Random, key: str, subject: _Subject) -> str:
    if key == "pets":
        return f"{rng.choice(NUMBERS)} {rng.choice(PETS)}"
    if key == "clothes":
        return f"{rng.choice(COLOURS)} {rng.choice(GARMENTS)}"
    value = rng.choice(_VALUES[key])
    while value == subject.name:  # nobody knows himself
        value = rng.choice(_VALUES[key])
    return value


def _capitalized(name: str) -> str:
    return name[0].upper() + name[1:]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One turn of a user in a chat: documents, possibly none, and a question.

    Attributes:
        documents: The documents that are new in this turn.
        fact: What is asked, a fact of these documents or of those of an earlier turn.
    """

    documents: tuple[Document, ...]
    fact: Fact

    @property
    def text(self) -> str:
        """The user's message: each document is a paragraph, and so is the question."""
        return "\n\n".join([*(document.text for document in self.documents), self.fact.question])


def make_chat(
    rng: random.Random,
    num_turns: int = 8,
    *,
    num_words: int = 128,
    first_num_words: int = 24,
) -> list[ChatTurn]:
    """Makes a chat in which each turn brings a document and asks about it or about one of an earlier turn.

    Args:
        rng: Source of every choice.
        num_turns: Number of turns.
        num_words: Wanted length of the documents in words, see :func:`make_documents`.
        first_num_words: The same for the document of the first turn.

    Returns:
        The turns. No fact is asked for twice.

    Raises:
        ValueError: As :func:`make_documents`.
    """
    documents = make_documents(rng, min(num_turns, 1), num_words=first_num_words)
    told = {fact.subject for document in documents for fact in document.facts}
    documents += make_documents(rng, max(num_turns - 1, 0), num_words=num_words, exclude=told)
    turns: list[ChatTurn] = []
    asked: set[Fact] = set()
    for index, document in enumerate(documents):
        earlier = [fact for past in documents[:index] for fact in past.facts if fact not in asked]
        fact = rng.choice(earlier if earlier and rng.random() < _EARLIER_SHARE else document.facts)
        asked.add(fact)
        turns.append(ChatTurn((document,), fact))
    return turns


def chat_messages(
    turns: Sequence[ChatTurn], answers: Sequence[str] | None = None, *, system: str | None = SYSTEM_PROMPT
) -> list[dict[str, str]]:
    """Writes a chat up to the last turn's question as messages for ``tokenizer.apply_chat_template``.

    Args:
        turns: The turns so far; the last one is still to be answered.
        answers: What was answered in the turns before the last; the right answers if None.
        system: The system message; none if None.

    Returns:
        Messages with the keys ``role`` and ``content``.

    Raises:
        ValueError: If there is not one answer for each turn before the last.
    """
    if answers is None:
        answers = [turn.fact.answer for turn in turns[:-1]]
    if len(answers) != len(turns) - 1:
        raise ValueError(f"`answers` must be one fewer than the {len(turns)} turns, got {len(answers)}.")
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn, answer in zip(turns, answers, strict=False):
        messages.append({"role": "user", "content": turn.text})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": turns[-1].text})
    return messages
