"""What the demo and `kvboost-hf verify` ask."""

import pytest

from kvboost_hf.assets import load_embedded
from kvboost_hf.assets.chat import encode
from kvboost_hf.demo.workloads import linked_documents, shuffled_documents
from recipes.evaluate import answer


@pytest.mark.parametrize("make", [shuffled_documents, linked_documents])
def test_documents_come_back_in_other_orders(make: object) -> None:
    assert callable(make)
    model, tokenizer = load_embedded()
    questions = make(tokenizer, 600, 8, seed=1)
    shown = [question.text.split("\n\n")[:-1] for question in questions]
    assert all(len(documents) == 6 for documents in shown)
    assert len({documents[0] for documents in shown[:6]}) == 6
    assert len({document for documents in shown for document in documents}) == (6 if make is shuffled_documents else 9)
    assert len({question.fact for question in questions}) == 8
    prompts = [[{"role": "user", "content": question.text}] for question in questions]
    assert all(abs(len(encode(tokenizer, prompt)) - 600) <= 40 for prompt in prompts)
    said = [answer(model, tokenizer, prompt)[0] for prompt in prompts]
    right = sum(text == question.fact.answer for text, question in zip(said, questions, strict=True))
    assert right >= 7  # the model reads 97 to 99% of such prompts


def test_linked_documents_ask_for_what_two_documents_tell() -> None:
    _, tokenizer = load_embedded()
    for question in linked_documents(tokenizer, 600, 8, seed=1)[1::2]:
        documents = question.text.split("\n\n")[:-1]
        told = question.fact.answer.removeprefix(f"T{question.fact.subject[1:]} ")
        after = next(at for at, document in enumerate(documents) if document.startswith(f"It {told}"))
        assert question.fact.subject in documents[after - 1].lower()
        assert question.fact.subject not in documents[after].lower()
