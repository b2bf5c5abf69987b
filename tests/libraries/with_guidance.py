"""Guidance: programs that run forwards themselves, and keep the K/V of their last text."""

from typing import Any

from transformers import DynamicCache

from tests.libraries.prompts import ABOUT_DOCUMENT, DOCUMENT
from tests.libraries.scenario import Answers, Session, scenario

_KNOWN = "It keeps the K/V of its last text itself, and wants the logits of all other tokens"


@scenario("guidance", "gen() and select() in one text after the other", known=_KNOWN)
def programs(session: Session) -> Answers:
    import guidance

    model = _model(session)
    answers = []
    for prompt in ABOUT_DOCUMENT:
        text = model + prompt + guidance.gen("answer", max_tokens=8, temperature=0.0)
        text += " In short: " + guidance.select(["Hadrian", "concrete", "609"], name="short")
        answers += [text["answer"], text["short"]]
    return answers


@scenario("guidance", "two texts in turns", known=_KNOWN)
def in_turns(session: Session) -> Answers:
    import guidance

    model = _model(session)
    other = "The Colosseum is an amphitheatre in Rome. It was begun under Vespasian and finished under Titus. " * 2
    texts = {name: model + start for name, start in (("one", DOCUMENT * 2), ("two", other))}
    answers = []
    for question in ("Who built it?", "When was that?"):
        for name in texts:
            texts[name] += f" {question} " + guidance.gen("answer", max_tokens=6, temperature=0.0)
            answers.append(texts[name]["answer"])
    return answers


def _model(session: Session) -> Any:
    import guidance

    _let_crop_keep()
    return guidance.models.Transformers(session.attach(session.model), session.tokenizer, echo=False)


def _let_crop_keep() -> None:
    """guidance 0.3.1 tells `crop` how many tokens to keep; transformers 5.23 wants to be told how many are to go."""
    crop = DynamicCache.crop
    if not hasattr(crop, "keeps"):

        def keeping(cache: DynamicCache, length: int) -> None:
            crop(cache, length - cache.get_seq_length() if length > 0 else length)

        keeping.keeps = True  # type: ignore[attr-defined]
        DynamicCache.crop = keeping  # type: ignore[assignment]
