"""What the demo and `kvboost-hf verify` ask."""

from itertools import pairwise

import pytest
from transformers import LlamaConfig

from kvboost_hf.assets import load_embedded
from recipes.evaluate import answer
from tests.internals.assets import encode
from tests.internals.prompts import linked_documents, shuffled_documents, workloads_for


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


@pytest.mark.parametrize(("context", "answer"), [(1024, 24), (1536, 100), (2048, 24), (8192, 200)])
def test_real_text_fits_into_the_context(context: int, answer: int) -> None:
    _, tokenizer = load_embedded()
    said = str(tokenizer.decode(tokenizer.encode("Anna lives in Oslo. " * answer, add_special_tokens=False)[:answer]))
    found = workloads_for(LlamaConfig(max_position_embeddings=context), answer)
    assert ("agent" in found) == (context >= 2048)
    for name, workload in found.items():
        asking = workload.ask(tokenizer, 8, 1)
        prompts = [next(asking).ids]
        while len(prompts) < 8:
            prompts.append(asking.send(said).ids)
        assert max(map(len, prompts)) + answer <= context
        grows = all(len(after) > len(before) for before, after in pairwise(prompts))
        assert grows == (name in ("chat", "agent"))
        heads = {tuple(ids[:16]) for ids in prompts}
        assert len(heads) == (6 if name == "shuffled" else 1)
