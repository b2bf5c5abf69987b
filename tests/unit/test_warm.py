"""Documents that are warmed: computed alone, or behind a prefix that is computed once, and found by content only."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, StoreFullError, check_model_compatibility
from kvboost_hf.assets import load_embedded
from tests.conftest import as_inputs, counted, make_model, random_ids
from tests.internals.cache import ContentChunker, LayerKVReader, StoredChunk, find_moved

pytestmark = pytest.mark.daily

PREFIX, DOCUMENTS = random_ids(50, seed=1), [random_ids(100, seed=2), random_ids(70, seed=3)]


def content(store: ChunkStore) -> list[tuple[int, int]]:
    """Where each chunk that is found by its content only began, and its length."""
    return sorted((c.start, len(c.tokens)) for c in store.inspect().chunks.values() if c.content_only)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_the_prefix_is_computed_once(name: str) -> None:
    model = make_model(name)
    store = ChunkStore(model, chunk_size=32)
    check_model_compatibility(model)  # its probes run once, and now
    with counted(model) as work:
        report = store.warm(documents=DOCUMENTS, prefix=PREFIX)
    assert work.tokens == 50 + 170
    assert (report.prompt_tokens, report.forwarded_tokens) == (220, 220)
    with counted(model) as work:
        again = store.warm(documents=[*DOCUMENTS, random_ids(40, seed=9)], prefix=PREFIX)
    assert work.tokens == again.forwarded_tokens
    assert work.tokens <= 40 + 8  # at most what is too short to be looked up, and the last token of the prefix
    assert again.prompt_tokens == 260
    # 4 tokens at the end of the first document, 6 of the second, and 8 of the last are too few to be moved.
    assert content(store) == [(50, 32), (50, 32), (50, 32), (82, 32), (82, 32), (114, 32)]


def test_kv_of_a_document_is_that_of_the_document_alone(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama, chunk_size=32)
    store.warm(documents=[document[0].tolist() for document in DOCUMENTS], pin=False)
    assert store.stats()["content_only"] == store.stats()["chunks"] == 5
    for document in DOCUMENTS:
        plain = llama(input_ids=document, use_cache=True).past_key_values
        row = np.concatenate([random_ids(37, seed=8)[0].numpy(), document[0].numpy()])
        segments = find_moved(row, 0, len(row), store.moved_index(store.root(b"")))
        assert (segments[0].start, segments[-1].stop) == (37, 37 + len(document[0]) // 32 * 32)
        assert [segment.continues for segment in segments] == [False] + [True] * (len(segments) - 1)
        for segment in segments:
            assert isinstance(segment.chunk, StoredChunk)
            at = slice(segment.start - segment.shift, segment.stop - segment.shift)
            for layer in range(2):
                kept, computed = LayerKVReader(segment.chunk.kv).layer(layer), plain.layers[layer]
                assert kept is not None
                assert torch.allclose(kept[0], computed.keys[0, :, at], atol=1e-5)
                assert torch.allclose(kept[1], computed.values[0, :, at], atol=1e-5)


def test_exact_prompts_do_not_find_documents(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama, chunk_size=32)
    store.warm(documents=DOCUMENTS)
    cache = ChunkReuseCache(llama, store)
    found = llama.generate(**as_inputs(DOCUMENTS[0]), past_key_values=cache, max_new_tokens=4)
    assert cache.report.forwarded_tokens == 100
    assert found.equal(llama.generate(**as_inputs(DOCUMENTS[0]), max_new_tokens=4))
    # What is now stored by prefix serves as well: what was stored by content only is dropped, its pins are not.
    assert content(store) == [(0, 32), (32, 32)]
    assert store.stats()["pinned_chunks"] == 5


def test_salts_are_kept_apart(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama, chunk_size=32, salt="a")
    store.warm(documents=DOCUMENTS)
    row = DOCUMENTS[0][0].numpy()
    assert find_moved(row, 0, 100, store.moved_index(store.root(b"a")))
    assert not find_moved(row, 0, 100, store.moved_index(store.root(b"b")))


def test_texts_and_content_cuts() -> None:
    model, tokenizer = load_embedded()
    store = ChunkStore(model, chunker=ContentChunker.for_tokenizer(tokenizer, chunk_size=32))
    documents = [
        "Anna lives in Oslo. She plays the piano and has a red lamp.\n\nTom has two goats.",
        "Ben is in Paris.",
    ]
    report = store.warm(documents=documents, prefix="Read this.", tokenizer=tokenizer)
    n = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("Read this.", *documents)]
    assert report.prompt_tokens == sum(n)
    first = tokenizer("Anna lives in Oslo. She plays the piano and has a red lamp.\n\n")["input_ids"]
    assert content(store) == [(n[0], len(first))]


def test_pinned_documents_that_do_not_fit(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama, chunk_size=32, max_bytes=90_000)
    store.warm(PREFIX[:, :32])
    with pytest.raises(
        StoreFullError, match=r"Document 1 of 70 tokens does not fit into `max_bytes`=90000 beside the "
    ):
        store.warm(documents=DOCUMENTS)
    assert store.stats()["pinned_chunks"] == 1
    store.warm(documents=DOCUMENTS, pin=False)
    assert store.stats()["bytes"] <= 90_000


class TestArguments:
    @pytest.mark.parametrize(
        "arguments", [{}, {"text_or_ids": [1, 2], "documents": [[1]]}, {"text_or_ids": [1, 2], "prefix": [1]}]
    )
    def test_either_a_text_or_documents(self, llama: PreTrainedModel, arguments: dict[str, object]) -> None:
        with pytest.raises(ValueError, match=r"`warm` takes either `text_or_ids`, or `documents` and perhaps "):
            ChunkStore(llama).warm(**arguments)  # type: ignore[arg-type]

    @pytest.mark.parametrize("ids", [torch.tensor([5.0, 6.5]), [5, 6.5], np.array([True, False]), torch.ones(3) * 1j])
    def test_ids_are_integers(self, llama: PreTrainedModel, ids: Any) -> None:
        for arguments in ({"text_or_ids": ids}, {"documents": [ids]}, {"documents": [[1]], "prefix": ids}):
            with pytest.raises(ValueError, match=r"must be a text or ids, which are integers, got torch\.\w+\. Pass"):
                ChunkStore(llama).warm(**arguments)

    def test_codes_cannot_be_moved(self, llama: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match="`live_quant` must be None with `documents`, for codes cannot be moved"):
            ChunkStore(llama).warm(documents=[[1]], live_quant="int8")

    def test_one_text_is_no_list(self, llama: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match=r"`documents` must be a sequence of texts or ids, got one text\."):
            ChunkStore(llama).warm(documents="Anna lives in Oslo.")

    @pytest.mark.parametrize("name", ["bloom", "gpt2", "qwen3_next"])
    def test_a_model_whose_kv_cannot_be_moved(self, name: str) -> None:
        model = make_model(name)
        with pytest.raises(ValueError, match=r"`documents` need a model whose K/V can be moved, but "):
            ChunkStore(model).warm(documents=DOCUMENTS)

    def test_a_model_with_dropout_in_training(self, llama: PreTrainedModel) -> None:
        llama.model.layers[0].self_attn.attention_dropout = 0.1
        with pytest.raises(ValueError, match=r"but in training mode, model\.layers\.0\.self_attn changes values"):
            ChunkStore(llama.train()).warm(documents=DOCUMENTS)

    def test_a_chunker_and_another_chunk_size(self, llama: PreTrainedModel) -> None:
        chunker = ContentChunker(64)
        assert ChunkStore(llama, chunker=chunker, chunk_size=64).chunker is chunker
        with pytest.raises(
            ValueError, match=r"`chunk_size` must be left out beside a `chunker`, or be its 64, got 128"
        ):
            ChunkStore(llama, chunker=chunker, chunk_size=128)


def test_content_cuts_serve_prefixes_too(llama: PreTrainedModel) -> None:
    """An unfinished chunk may be longer than the one that is cut there when more of the prompt is known."""
    store = ChunkStore(llama, chunker=ContentChunker(64, separators=[(7,)]))
    prompt = random_ids(300, seed=4)
    for n in (150, 300, 220):
        cache = ChunkReuseCache(llama, store)
        found = llama.generate(**as_inputs(prompt[:, :n]), past_key_values=cache, max_new_tokens=3)
        assert found.equal(llama.generate(**as_inputs(prompt[:, :n]), max_new_tokens=3))
        cache.reset()
    cache = ChunkReuseCache(llama, store)
    llama.generate(**as_inputs(prompt), past_key_values=cache, max_new_tokens=3)
    assert cache.report.forwarded_tokens <= 8
