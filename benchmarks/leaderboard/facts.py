"""Documents of a made-up world that make sense in one order only, with questions whose answers are known.

Each but the first goes on, by pronoun only, about the last subject of the document before. A store has seen them in
another order, none behind the document that it belongs behind. Whoever takes the stored K/V as it is must get the
pronouns at the starts of documents wrong; plain generate() does not.
"""

import random
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from kvboost_hf.assets.texts import encode
from kvboost_hf.assets.world import ChatTurn, Document, Fact, chat_messages, make_documents

NUM_WORDS = (48, 64, 96)  # of each document; a case has one of them


@dataclass(frozen=True, slots=True)
class Facts:
    """Documents in the order in which they make sense, and what is asked about them."""

    documents: tuple[Document, ...]
    order: tuple[int, ...]  # in which the store has seen them
    seen_fact: Fact  # what was asked then
    starts: tuple[Fact, ...]  # asked about: told at the start of a document, of a subject that the one before names
    others: tuple[Fact, ...]  # asked about
    num_facts: tuple[int, int]  # of either kind in all documents, asked about or not

    def ids(self, tokenizer: Any, fact: Fact) -> list[int]:
        """The prompt that asks for a fact, documents in their own order."""
        return encode(tokenizer, chat_messages([ChatTurn(self.documents, fact)]))

    def seen_ids(self, tokenizer: Any) -> list[int]:
        """The prompt that the store has seen."""
        documents = tuple(self.documents[i] for i in self.order)
        return encode(tokenizer, chat_messages([ChatTurn(documents, self.seen_fact)]))


def other_order(rng: random.Random, count: int) -> tuple[int, ...]:
    """An order in which nothing stands behind what it stands behind in `range(count)`, at least 3."""
    order = list(range(count))
    while order[0] == 0 or any(b == a + 1 for a, b in pairwise(order)):
        rng.shuffle(order)
    return tuple(order)


def draw_facts(seed: str, num_documents: int, questions: int) -> Facts:
    """A case with `questions` about facts of either kind."""
    rng = random.Random(seed)
    documents = make_documents(rng, num_documents, num_words=rng.choice(NUM_WORDS), pronoun_start=True)
    starts: list[Fact] = []
    for before, document in pairwise(documents):
        subject = before.facts[-1].subject
        starts += takewhile(lambda fact: fact.subject == subject, document.facts)
    others = [fact for document in documents for fact in document.facts if fact not in starts]
    seen_fact, *asked = rng.sample(others, 1 + questions)
    return Facts(
        documents=tuple(documents),
        order=other_order(rng, num_documents),
        seen_fact=seen_fact,
        starts=tuple(rng.sample(starts, questions)),
        others=tuple(asked),
        num_facts=(len(starts), len(others)),
    )
