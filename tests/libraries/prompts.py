"""What scenarios ask, and what several of them know."""

from collections.abc import Callable
from typing import Any

Message = dict[str, str]

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
SYSTEM = (
    "You are a friendly guide to the city of Rome. You answer in one short sentence, you name the place that you "
    "speak of, and you never speak of other cities."
)
QUESTIONS = [
    "Where can I see old statues?",
    "When does it open?",
    "Is there a park near it?",
    "Can I walk there?",
    "What may I eat in the park?",
    "Which bridge is the oldest?",
    "Who built it?",
    "Thank you! Anything else?",
]
DOCUMENT = (
    "The Pantheon is a former Roman temple and, since AD 609, a church in Rome. It was rebuilt by the emperor "
    "Hadrian around AD 126. Its dome is still the largest of unreinforced concrete in the world. "
)
ABOUT_DOCUMENT = [
    f"{DOCUMENT * 2}Question: {question} Answer:"
    for question in ("Who rebuilt it?", "What is its dome made of?", "Since when is it a church?")
]
PAGED = "Continuous batching keeps K/V in pages of its own, for all requests together, and passes no cache"


def talk(questions: list[str], answer: Callable[[list[Message]], str]) -> list[str]:
    """A chat of so many turns: what the model says goes back in as text."""
    messages = [{"role": "system", "content": SYSTEM}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer(messages)})
    return [message["content"] for message in messages[2::2]]
