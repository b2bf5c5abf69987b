"""K/V that is still loading while the model computes: the same answers, whatever turns out to be damaged."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore
from tests.conftest import as_inputs, counted, left_pad, random_ids
from tests.internals.cache import loading, prompt_plan, reused
from tests.parity.test_tiers import BASE, fill, generate, restart
from tests.parity.test_tiers import serve as same_as_plain

pytestmark = pytest.mark.usefixtures("loading_is_worth_it")


@pytest.fixture
def loadings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[loading.Loading]]:
    """All that was loaded meanwhile, however little; their threads must have ended in the end."""
    found: list[loading.Loading] = []

    class Noted(loading.Loading):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(prompt_plan, "_MIN_BYTES", 1)
    monkeypatch.setattr(reused, "Loading", Noted)
    yield found
    for each in found:
        each._thread.join(10)
        assert not each._thread.is_alive()


def blobs(folder: Path) -> list[Path]:
    return sorted((folder / "tier" / "blobs").rglob("*.safetensors"))


def flip(path: Path, part: float) -> None:
    """Flip a bit so far into what follows the header."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + int((len(data) - start) * part)] ^= 0x10
    path.write_bytes(data)


def test_much_is_loaded_meanwhile(tmp_path: Path, disk: str, loadings: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(prompt_plan, "_MIN_BYTES", 2**20)
    ids = random_ids(620, seed=1)
    fill("deep_llama", disk, ids, chunk_size=128)
    model, store, cache = restart("deep_llama", disk, chunk_size=128)
    assert same_as_plain(model, cache, ids).tier_tokens["disk"] == 619
    assert len(loadings) == 1
    assert not loadings[0].computed
    store.close()
    model, store, cache = restart("deep_llama", disk, chunk_size=128)
    assert same_as_plain(model, cache, ids[:, :250]).tier_tokens["disk"] == 249
    assert len(loadings) == 1  # less than that is loaded at once
    store.close()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bloom", "deepseek_v3"])
def test_the_same_answers(name: str, disk: str, loadings: list[Any]) -> None:
    fill(name, disk, BASE)
    for ids in (BASE, BASE[:, :77], torch.cat([BASE[:, :77], random_ids(50, seed=2)], dim=1)):
        model, store, cache = restart(name, disk)
        assert same_as_plain(model, cache, ids).tier_tokens["disk"] >= 76
        store.flush()
        assert same_as_plain(model, ChunkReuseCache(model, store), ids).tier_tokens["ram"] >= 76
        store.close()
    assert len(loadings) == 3


def test_codecs_are_decoded_meanwhile(disk: str, loadings: list[Any]) -> None:
    fill("llama", disk, BASE, codec="turboquant")
    model, store, cache = restart("llama", disk, codec="turboquant")
    found = generate(model, as_inputs(BASE), cache)
    assert cache.report.tier_tokens["disk"] == 149
    store.flush()
    again = generate(model, as_inputs(BASE), ChunkReuseCache(model, store))
    assert all(torch.equal(a, b) for a, b in zip(found.logits, again.logits, strict=True))
    assert len(loadings) == 1
    store.close()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_modes_of_autograd(disk: str, loadings: list[Any], mode: Any) -> None:
    fill("llama", disk, BASE)
    model, store, cache = restart("llama", disk)
    with mode():
        same_as_plain(model, cache, BASE)
        same_as_plain(model, cache, torch.cat([BASE, random_ids(9, seed=3)], dim=1))
    same_as_plain(model, cache, torch.cat([BASE, random_ids(30, seed=4)], dim=1))
    assert len(loadings) == 1
    store.close()


def test_with_gradients_nothing_is_loaded(disk: str, loadings: list[Any]) -> None:
    fill("llama", disk, BASE)
    model, store, cache = restart("llama", disk)
    output = model(input_ids=BASE, past_key_values=cache, use_cache=True, logits_to_keep=1)
    assert "gradients are enabled" in (cache.report.bypass_reason or "")
    assert output.logits.requires_grad
    assert not loadings
    store.close()


@pytest.mark.parametrize(("which", "part"), [(0, 0.0), (2, 0.4), (4, 0.99), (1, 0.6)])
def test_damage_in_the_middle_of_a_forward(
    tmp_path: Path, disk: str, loadings: list[Any], which: int, part: float
) -> None:
    fill("llama", disk, BASE)
    harmed = blobs(tmp_path)[which]
    flip(harmed, part)
    damaged = harmed.read_bytes()
    model, store, cache = restart("llama", disk)
    with counted(model) as work:
        found = generate(model, as_inputs(BASE), cache)
    plain = generate(model, as_inputs(BASE))
    assert found.sequences.tolist() == plain.sequences.tolist()
    for ours, theirs in zip(found.logits, plain.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    assert [each.computed for each in loadings] == [True]
    report = cache.report
    assert (report.reused_tokens, report.forwarded_tokens) == (0, 150)  # all of it was computed
    assert report.row_tokens == (0,)
    assert work.tokens == 150 + 3
    assert store.stats()["lost"] == 1
    cache.reset()
    store.close()
    assert not harmed.exists() or harmed.read_bytes() != damaged  # a longer one may have taken its place
    model, store, cache = restart("llama", disk)
    assert same_as_plain(model, cache, BASE).tier_tokens["disk"] == 149
    assert not loadings[-1].computed
    store.close()


@pytest.mark.parametrize("harm", [False, True])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_batch_with_padding(tmp_path: Path, disk: str, loadings: list[Any], name: str, harm: bool) -> None:
    """Rows that end alike in what is stored; and one that is all padding where the other is served."""
    shared = BASE[:, :96]
    rows = [torch.cat([shared, random_ids(40, seed=7)], dim=1), torch.cat([shared, random_ids(33, seed=8)], dim=1)]
    short = random_ids(40, seed=9)
    fill(name, disk, BASE, short)
    if harm:
        for path in blobs(tmp_path)[:3]:
            flip(path, 0.9)
    for batch in (left_pad(*rows), left_pad(*rows[::-1]), left_pad(rows[0], rows[0])):
        model, store, cache = restart(name, disk)
        same_as_plain(model, cache, batch)
        store.close()
    for batch in (left_pad(short, rows[0]), left_pad(rows[0], short)):
        model, store, cache = restart(name, disk)
        same_as_plain(model, cache, batch)
        store.close()
    assert loadings


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_damage_behind_padded_rows_that_are_held(tmp_path: Path, disk: str, loadings: list[Any], name: str) -> None:
    """Rows of unequal lengths go on from what the cache holds, and what they would go on with is damaged."""
    first, second = random_ids(110, seed=7), random_ids(97, seed=8)
    fill(name, disk, first, second)
    model, store, cache = restart(name, disk)
    same_as_plain(model, cache, left_pad(first[:, :45], second[:, :32]))
    store.flush()  # what was loaded is in host memory
    for path in blobs(tmp_path):
        flip(path, 0.9)
    report = same_as_plain(model, cache, left_pad(first, second))
    assert [each.computed for each in loadings] == [False, True]
    assert (report.row_tokens, report.forwarded_tokens) == ((45, 32), 130)  # all behind what was held
    store.close()


def test_a_row_that_is_padding_where_others_are_served(disk: str, loadings: list[Any]) -> None:
    """Nothing of it is loaded, though it could be served further on."""
    short = random_ids(30, seed=9)
    fill("llama", disk, BASE[:, :64], short)
    model, store, cache = restart("llama", disk)
    longer = torch.cat([BASE[:, :64], random_ids(40, seed=10)], dim=1)
    batch = left_pad(short, longer)
    report = same_as_plain(model, cache, batch)
    assert report.tier_tokens["disk"] >= 64
    store.close()


class Interrupt(Exception):
    pass


def _raise(*args: Any, **kwargs: Any) -> None:
    raise Interrupt


def test_an_exception_in_the_forward(disk: str, loadings: list[Any], monkeypatch: Any) -> None:
    fill("llama", disk, BASE)
    model, store, cache = restart("llama", disk)

    layer = type(model.model.layers[1].mlp)
    with monkeypatch.context() as patched:
        patched.setattr(layer, "forward", _raise)
        with pytest.raises(Interrupt):
            generate(model, as_inputs(BASE), cache)
    assert same_as_plain(model, cache, BASE).reused_tokens == 149
    store.close()


def test_an_exception_before_the_first_layer(disk: str, loadings: list[Any], monkeypatch: Any) -> None:
    """The thread may still be at work when the cache is used again, or gone with the cache."""
    fill("llama", disk, BASE)
    model, store, cache = restart("llama", disk)
    goes_on, fill_layer = threading.Event(), loading.Loading._fill

    def slow(self: loading.Loading, idx: int) -> None:
        goes_on.wait(10)
        fill_layer(self, idx)

    monkeypatch.setattr(loading.Loading, "_fill", slow)
    with monkeypatch.context() as patched:
        patched.setattr(type(model.model.rotary_emb), "forward", _raise)
        with pytest.raises(Interrupt):
            generate(model, as_inputs(BASE), cache)
    goes_on.set()
    assert same_as_plain(model, cache, BASE).reused_tokens == 149
    store.close()


def test_several_threads(disk: str, loadings: list[Any]) -> None:
    shared = BASE[:, :96]
    fill("llama", disk, BASE)
    model, store, _ = restart("llama", disk)
    wrong: list[Any] = []

    def work(number: int) -> None:
        try:
            cache = ChunkReuseCache(model, store)
            for turn in range(3):
                ids = torch.cat([shared, random_ids(20, seed=10 * number + turn)], dim=1)
                found = generate(model, as_inputs(ids), cache)
                if cache.report.reused_tokens < 96:
                    wrong.append(cache.report)
                if found.sequences.tolist() != generate(model, as_inputs(ids)).sequences.tolist():
                    wrong.append((number, turn))
                cache.reset()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert loadings
    store.flush()
    assert store.stats()["bytes"] == sum(chunk.nbytes for chunk in store.inspect().chunks.values())
    store.close()


def test_what_is_loaded_is_what_was_computed(disk: str, loadings: list[Any]) -> None:
    """The columns themselves, in every layer."""
    fill("llama", disk, BASE)
    model, store, cache = restart("llama", disk)
    plain: PreTrainedModel | Any = model(BASE, use_cache=True).past_key_values
    generate(model, as_inputs(BASE), cache, max_new_tokens=1)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(ours.keys[:, :, :149], theirs.keys[:, :, :149], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values[:, :, :149], theirs.values[:, :, :149], atol=1e-4, rtol=1e-4)
    store.close()


def test_a_store_without_lower_tiers_loads_nothing_meanwhile(loadings: list[Any], llama: PreTrainedModel) -> None:
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32))
    for _ in range(2):
        generate(llama, as_inputs(BASE), cache)
        cache.reset()
    assert not loadings


def test_an_interrupt_just_after_loading_began(disk: str, loadings: list[Any], monkeypatch: Any) -> None:
    """Nothing may be written to columns that are used again."""
    fill("llama", disk, BASE)
    model, store, cache = restart("llama", disk)
    fill_layer = loading.Loading._fill

    looked = threading.Event()

    def slowly(self: loading.Loading, idx: int) -> None:
        assert looked.wait(60)
        time.sleep(0.3)
        fill_layer(self, idx)

    with monkeypatch.context() as patched:
        patched.setattr(loading.Loading, "_fill", slowly)
        patched.setattr(reused.Reused, "_note_filled", _raise)
        with pytest.raises(Interrupt):
            generate(model, as_inputs(BASE), cache)
        assert loadings[0]._thread.is_alive()
        looked.set()
        cache.reset()
        assert not loadings[0]._thread.is_alive()
    same_as_plain(model, cache, BASE)
    store.close()
