"""Somebody writes to a tier who must not: what is found there is never used, and never the end of a prompt."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.assets import load_embedded
from tests.conftest import random_ids
from tests.forged import Forged, change_all, tokens_of, with_tokens
from tests.internals.cache import (
    Blob,
    ChunkForms,
    ColumnFormat,
    DamagedBlobError,
    Entry,
    Kind,
    MeasuredTier,
    ModelForm,
    StateFormat,
    below,
    pack_entry,
    prompt_plan,
    read_kv,
    read_states,
    unpack_entry,
)
from tests.internals.disk import DiskTier
from tests.internals.server import ModelEngine, make_app
from tests.parity.test_tiers import BASE, DOCUMENTS, fill, prompt_of, restart, serve, serve_blended
from tests.server.conftest import SETTINGS, listening

Change = Callable[[Forged], None]


pytestmark = pytest.mark.usefixtures("loading_is_worth_it")


# Blobs with other contents, and the checksums that belong to them. The first tensor is the first to be read.


def first(blob: Forged) -> dict[str, Any]:
    return next(iter(blob.header.values()))


def no_sums(blob: Forged) -> None:
    blob.sums = {}


def fewer_sums(blob: Forged) -> None:
    blob.sums = {name: sums[:-1] for name, sums in blob.sums.items()}


def sums_of_others(blob: Forged) -> None:
    blob.sums = {f"not {name}": sums for name, sums in blob.sums.items()}


def sums_of_another_kind(blob: Forged) -> None:
    blob.sums = dict.fromkeys(blob.sums, 5)


def sums_by_name(blob: Forged) -> None:
    blob.sums = {name: {str(at): each for at, each in enumerate(sums)} for name, sums in blob.sums.items()}


def another_name(blob: Forged) -> None:
    name = next(iter(blob.header))
    blob.header[f"{name}x"], blob.sums[f"{name}x"] = blob.header.pop(name), blob.sums.pop(name)


def another_type(blob: Forged) -> None:
    for spec in blob.header.values():
        spec["dtype"] = "I32"


def an_unknown_type(blob: Forged) -> None:
    first(blob)["dtype"] = "F4"


def another_shape(blob: Forged) -> None:
    for spec in blob.header.values():
        spec["shape"] = [*spec["shape"][:1], *spec["shape"][:0:-1]]


def no_shape(blob: Forged) -> None:
    first(blob)["shape"] = []


def shapes_of_millions(blob: Forged) -> None:
    first(blob)["shape"] = [2**40, 2**40]


def negative_sizes(blob: Forged) -> None:
    first(blob)["shape"] = [-size for size in first(blob)["shape"]]


def negative_places(blob: Forged) -> None:
    first(blob)["data_offsets"] = [-64, first(blob)["data_offsets"][1] - 64]


def places_far_away(blob: Forged) -> None:
    first(blob)["data_offsets"] = [2**62, 2**62 + 64]


def bytes_of_nothing(blob: Forged) -> None:
    blob.body += bytes(64)


def no_layout(blob: Forged) -> None:
    blob.layout = None


def a_layout_of_lists(blob: Forged) -> None:
    blob.layout = [[[]]]


def a_deep_layout(blob: Forged) -> None:
    for _ in range(500):
        blob.layout = [blob.layout]


def no_entry(blob: Forged) -> None:
    blob.entry = None


def no_key(blob: Forged) -> None:
    del blob.entry["key"]


def another_key(blob: Forged) -> None:
    blob.entry["key"] = "00" * 20


def another_parent(blob: Forged) -> None:
    blob.entry["parent"] = "00" * 20


def another_kind(blob: Forged) -> None:
    blob.entry["kind"] = "states" if blob.entry["kind"] != "states" else "chunk"


def another_root(blob: Forged) -> None:
    blob.entry["root"] = "00" * 20


def another_start(blob: Forged) -> None:
    blob.entry["start"] += 1


def a_start_beyond_numbers(blob: Forged) -> None:
    blob.entry["start"] = 10**30


def other_tokens(blob: Forged) -> None:
    with_tokens(blob.entry, (tokens_of(blob.entry) + 1) % 200)


def one_token_more(blob: Forged) -> None:
    with_tokens(blob.entry, [*tokens_of(blob.entry), 5])


def tokens_that_are_none(blob: Forged) -> None:
    blob.entry["tokens"] = "?"


def other_tensors(blob: Forged) -> None:
    blob.replace({"0.exact": torch.zeros(3, 1, 2)})


def no_tensors(blob: Forged) -> None:
    blob.replace({})


def one_tensor_more(blob: Forged) -> None:
    start = len(blob.body)
    blob.body += bytes(64)
    blob.header["more"] = {"dtype": "U8", "shape": [1, 64], "data_offsets": [start, start + 64]}
    blob.sum_up()


ANY = [
    *(
        no_sums,
        fewer_sums,
        sums_of_others,
        sums_of_another_kind,
        sums_by_name,
        another_name,
        another_type,
        an_unknown_type,
    ),
    *(another_shape, no_shape, shapes_of_millions, negative_sizes, negative_places, places_far_away),
    *(bytes_of_nothing, no_layout, a_layout_of_lists, a_deep_layout, no_entry, no_key, another_key, another_parent),
    *(another_kind, another_root, another_start, a_start_beyond_numbers, other_tokens, one_token_more),
    *(tokens_that_are_none, other_tensors, no_tensors, one_tensor_more),
]

# Of K/V


def fewer_layers(blob: Forged) -> None:
    blob.layout["places"].pop()


def more_layers(blob: Forged) -> None:
    blob.layout["places"].append(blob.layout["places"][0])


def layers_without_columns(blob: Forged) -> None:
    blob.layout["places"] = [None for _ in blob.layout["places"]]


def values_in_place_of_keys(blob: Forged) -> None:
    blob.layout["places"] = [[own[1], own[1]] for own in blob.layout["places"]]


def places_that_are_none(blob: Forged) -> None:
    blob.layout["places"][0] = [[7, 0], [0, -1]]


def places_that_are_no_numbers(blob: Forged) -> None:
    blob.layout["places"][0] = [["a", 0.5], {}]


def the_last_place_a_little_off(blob: Forged) -> None:
    blob.layout["places"][-1][-1][1] += 5


def no_blocks(blob: Forged) -> None:
    blob.layout["blocks"] = []


def blocks_of_another_shape(blob: Forged) -> None:
    for block in blob.layout["blocks"]:
        block["shape"] = block["shape"][::-1]


def blocks_of_other_planes(blob: Forged) -> None:
    blob.layout["blocks"][0]["planes"] = ["codes", "scale"]


def one_head(blob: Forged) -> None:
    """All of it fits together, and would be broadcast to all heads."""
    block = blob.layout["blocks"][0]
    count = first(blob)["shape"][0]
    block["shape"] = [1, *block["shape"][1:]]
    blob.replace({"0.exact": torch.zeros(count, *block["shape"])})


def another_model(blob: Forged) -> None:
    """As a model of more heads, in another precision, would have written it."""
    block = blob.layout["blocks"][0]
    block["shape"], block["dtype"] = [8, *block["shape"][1:]], "float16"
    blob.replace({"0.exact": torch.zeros(first(blob)["shape"][0], *block["shape"], dtype=torch.float16)})


def columns_of_one_token(blob: Forged) -> None:
    """K/V of one token, which would be broadcast to all."""
    block = blob.layout["blocks"][0]
    block["shape"] = [block["shape"][0], 1, block["shape"][2]]
    blob.replace({"0.exact": torch.zeros(first(blob)["shape"][0], *block["shape"])})


OF_CHUNKS = [
    *(fewer_layers, more_layers, layers_without_columns, values_in_place_of_keys, places_that_are_none),
    *(
        the_last_place_a_little_off,
        places_that_are_no_numbers,
        no_blocks,
        blocks_of_another_shape,
        blocks_of_other_planes,
        one_head,
    ),
    *(another_model, columns_of_one_token),
]

# Of states


def states_of_fewer_layers(blob: Forged) -> None:
    blob.layout["layers"].pop()


def states_of_no_layer(blob: Forged) -> None:
    blob.layout["layers"] = [None for _ in blob.layout["layers"]]


def states_that_are_absent(blob: Forged) -> None:
    for layer in filter(None, blob.layout["layers"]):
        layer["present"] = [False for _ in layer["present"]]


def states_of_another_type(blob: Forged) -> None:
    for layer in filter(None, blob.layout["layers"]):
        layer["extra"] = json.loads(json.dumps(layer["extra"]).replace("float32", "nn"))


def states_of_another_shape(blob: Forged) -> None:
    blob.replace({name: torch.zeros([*spec["shape"], 2]) for name, spec in blob.header.items()})


OF_STATES = [
    *(states_of_fewer_layers, states_of_no_layer, states_that_are_absent, states_of_another_type),
    states_of_another_shape,
]


def forged(change: Change, kinds: set[str] | None = None) -> Callable[[bytes], bytes]:
    """Makes a forged blob of a right one, if it is of one of these kinds."""

    def make(data: bytes) -> bytes:
        blob = Forged(data)
        if kinds is None or blob.entry["kind"] in kinds:
            change(blob)
            return blob.joined()
        return data

    return make


def name_of(change: Change) -> str:
    return change.__name__


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, ModelForm]]:
    """Folders with right blobs of all kinds, and what the model's look like."""
    found = {}
    for name in ("llama", "qwen3_next"):
        folder = tmp_path_factory.mktemp(name) / "tier"
        model, store, cache = restart(name, f"disk:{folder}:1GB")
        serve(model, cache, random_ids(70, seed=4))
        cache.reset()
        if name == "llama":
            store.warm(documents=DOCUMENTS[:1])
        store.close()
        form = ModelForm.of(model)
        assert form is not None
        found[name] = folder, form
    return found


@pytest.fixture
def filled(folders: dict[str, tuple[Path, ModelForm]], tmp_path: Path) -> Callable[[str], tuple[Path, ModelForm]]:
    """Copies of them."""

    def copy(name: str) -> tuple[Path, ModelForm]:
        folder, form = folders[name]
        return Path(shutil.copytree(folder, tmp_path / "tier")), form

    return copy


def read(blob: Blob, form: ModelForm) -> None:
    """All of a blob, as a store reads it."""
    if blob.entry.kind is Kind.STATES:
        read_states(blob, form, StateFormat())
    else:
        read_kv(blob, ChunkForms(ColumnFormat(), form)).check()
    blob.check_all()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        *((change, kind) for change in (*ANY, *OF_CHUNKS) for kind in ("chunk", "content")),
        *((change, "states") for change in (*ANY, *OF_STATES)),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_a_forged_blob_is_not_read(change: Change, kind: str, filled: Callable[[str], tuple[Path, ModelForm]]) -> None:
    folder, form = filled("qwen3_next" if kind == "states" else "llama")
    change_all(folder, forged(change, {kind}))
    tier = DiskTier(folder, 10**9)
    measured = MeasuredTier(tier)
    counts = dict.fromkeys(("right", "damaged"), 0)
    for entry in list(tier.entries()):
        try:
            blob = measured.read(entry)
            assert blob is not None
            read(blob, form)
            counts["right"] += 1
            assert entry.kind.value != kind
        except DamagedBlobError:
            counts["damaged"] += 1
            assert entry.kind.value == kind
    assert counts["damaged"] > 0
    tier.close()


def test_places_a_little_off_are_damage(filled: Callable[[str], tuple[Path, ModelForm]]) -> None:
    """Any block, and any place in one, by a few; and each of a whole chunk by one."""
    folder, form = filled("llama")
    path = next(folder.rglob("*.safetensors"))
    data = path.read_bytes()
    places = Forged(data).layout["places"]
    tensors = [(layer, tensor) for layer, own in enumerate(places) for tensor in range(len(own))]
    ways = [(some, at, by) for some in ([each] for each in tensors) for at in (0, 1) for by in (-5, -1, 1, 5)]
    for some, at, by in (*ways, *((tensors, at, by) for at in (0, 1) for by in (-1, 1))):
        blob = Forged(data)
        for layer, tensor in some:
            blob.layout["places"][layer][tensor][at] += by
        with pytest.raises(DamagedBlobError):
            read(Blob(memoryview(blob.joined())), form)
    read(Blob(memoryview(data)), form)


@pytest.mark.daily
@pytest.mark.parametrize("change", [no_sums, no_shape, no_layout, shapes_of_millions, one_head], ids=name_of)
def test_a_forged_blob_is_no_reason_not_to_start(
    change: Change, filled: Callable[[str], tuple[Path, ModelForm]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of those that are there is read as a store is opened, to see how fast the tier is."""
    monkeypatch.setattr(below, "_LEAST_BYTES", 1)
    folder, _ = filled("llama")
    change_all(folder, forged(change))
    before = len(list(folder.rglob("*.safetensors")))
    measured = MeasuredTier(DiskTier(folder, 10**9))
    taken_away = before - len(list(folder.rglob("*.safetensors")))
    assert measured.stats()["errors"] == taken_away == int(change is not one_head)  # which only a model can tell
    measured.tier.close()


def restart_knowing(name: str, disk: str, **settings: Any) -> tuple[PreTrainedModel, ChunkStore, ChunkReuseCache]:
    """As `restart`, with the few tokens computed that tell what K/V of the model looks like."""
    model, store, cache = restart(name, disk, **settings)
    root = store.root(b"")
    assert root is not None
    assert store._reader.form_of(root)
    return model, store, cache


def put_right(name: str, disk: str, store: ChunkStore, made: dict[Path, bytes], reused: int) -> None:
    """What could not be read was counted and deleted, and right blobs have taken its place."""
    store.flush()
    stats = store.stats()
    assert stats["tiers"]["disk"]["errors"] == stats["lost"] > 0
    store.close()
    assert any(not path.exists() or path.read_bytes() != data for path, data in made.items())
    model, store, cache = restart(name, disk)
    assert serve(model, cache, BASE).reused_tokens == reused
    assert store.stats()["lost"] == 0
    store.close()


@pytest.mark.parametrize(
    "change",
    [no_sums, another_name, other_tokens, fewer_layers, one_head, the_last_place_a_little_off],
    ids=name_of,
)
@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_forged_chunk_is_a_miss(
    tmp_path: Path, disk: str, change: Change, meanwhile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded before the model computes, and layer by layer meanwhile."""
    monkeypatch.setattr(prompt_plan, "_MIN_BYTES", 1 if meanwhile else 2**40)
    fill("llama", disk, BASE)
    made = change_all(tmp_path / "tier", forged(change))
    model, store, cache = restart_knowing("llama", disk)
    assert serve(model, cache, BASE).reused_tokens == 0
    cache.reset()
    put_right("llama", disk, store, made, 149)


@pytest.mark.parametrize("change", [another_name, states_of_no_layer], ids=name_of)
def test_forged_states_are_a_miss(tmp_path: Path, disk: str, change: Change) -> None:
    fill("qwen3_next", disk, BASE)
    made = change_all(tmp_path / "tier", forged(change, {"states"}))
    model, store, cache = restart_knowing("qwen3_next", disk)
    assert serve(model, cache, BASE).reused_tokens == 0
    cache.reset()
    put_right("qwen3_next", disk, store, made, 149)


@pytest.mark.parametrize("change", [no_sums, another_name, another_start, no_blocks], ids=name_of)
def test_a_forged_document_is_not_moved(tmp_path: Path, disk: str, change: Change) -> None:
    model, store, _ = restart("llama", disk)
    store.warm(documents=DOCUMENTS)
    store.close()
    change_all(tmp_path / "tier", forged(change))
    model, store, _ = restart("llama", disk)
    assert serve_blended(model, store, prompt_of(0, 1)).moved_tokens == 0
    assert store.stats()["tiers"]["disk"]["errors"] > 0
    store.close()


@pytest.mark.parametrize("codec", ["int8", "turboquant"])
def test_forged_codes_are_a_miss(tmp_path: Path, disk: str, codec: str) -> None:
    """A plane of other numbers would be decoded into wrong K/V, or not at all."""
    fill("llama", disk, BASE, codec=codec)
    change_all(tmp_path / "tier", forged(another_shape))
    model, store, cache = restart_knowing("llama", disk, codec=codec)
    assert serve(model, cache, BASE).reused_tokens == 0
    assert store.stats()["tiers"]["disk"]["errors"] > 0
    store.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def changes(draw: st.DrawFn, value: Any) -> Any:
    """JSON that differs in one place."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        changed = value.copy()
        if draw(st.integers(0, 5)):
            changed[key] = draw(changes(value[key]))
        else:
            del changed[key]
        return changed
    return draw(JSON)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_header_does_any_harm(name: str, folders: dict[str, tuple[Path, ModelForm]], data: st.DataObject) -> None:
    """Whatever it says is a miss: no error of another kind, and not much memory."""
    folder, form = folders[name]
    right = data.draw(st.sampled_from(sorted(folder.rglob("*.safetensors")))).read_bytes()
    blob = Forged(right)
    read(Blob(memoryview(blob.joined())), form)  # as it was, it is right
    part = data.draw(st.sampled_from(["header", "entry", "layout", "sums", "told"]))
    setattr(blob, part, data.draw(changes(getattr(blob, part))))
    try:
        made = blob.joined()
    except (TypeError, AttributeError):  # no header at all
        return
    with suppress(DamagedBlobError):  # or it is as good as it was
        read(Blob(memoryview(made)), form)


# What blobs are found by


def entries_with(**told: Any) -> Callable[[Entry], Entry]:
    return lambda entry: replace(entry, **told)


NO_TOKENS, MANY_TOKENS = np.zeros(0, np.int64), np.zeros(10**6, np.int64)


@pytest.mark.parametrize(
    "change",
    [
        *map(lambda start: entries_with(start=start), (-1, 2**62)),
        *map(lambda nbytes: entries_with(nbytes=nbytes), (-1, 0, 2**62)),
        *map(lambda tokens: entries_with(tokens=tokens), (NO_TOKENS, MANY_TOKENS)),
        *map(lambda head: entries_with(head=head), (b"", b"x" * 20, b"x" * 500)),
        *map(lambda parent: entries_with(parent=parent), (b"", b"x" * 20)),
        *map(lambda kind: entries_with(kind=kind), Kind),
        entries_with(root=b"x" * 20),
        entries_with(model=b""),
    ],
    ids=range(17),
)
def test_forged_entries_are_a_miss(tmp_path: Path, change: Callable[[Entry], Entry]) -> None:
    """On a server or in a bucket, what a blob is found by is beside it; lists of what begins alike are, too."""
    address = (tmp_path / "tier").as_uri()
    model, store, cache = restart("llama", address)
    serve(model, cache, BASE)
    cache.reset()
    store.warm(documents=DOCUMENTS[:2])
    store.close()
    changed = 0
    for path in (tmp_path / "tier" / "chunks").glob("*.entry"):
        before = unpack_entry(path.read_bytes())
        path.write_bytes(pack_entry(change(before)))
        changed += pack_entry(change(before)) != pack_entry(before)
    assert changed > 0
    model, store, cache = restart("llama", address)
    serve(model, cache, BASE)
    serve(model, ChunkReuseCache(model, store), BASE[:, :70])  # less than a chunk is looked up by how it begins
    serve_blended(model, store, prompt_of(0, 1))
    store.flush()
    store.close()


def test_a_forged_list_of_what_begins_alike(tmp_path: Path) -> None:
    address = (tmp_path / "tier").as_uri()
    fill("llama", address, BASE)
    heads = sorted((tmp_path / "tier" / "heads").iterdir())
    names = [path.name for path in heads]
    for path in heads:
        path.rename(path.with_suffix(".moved"))
    for name, path in zip([*names[1:], names[0]], heads, strict=True):
        path.with_suffix(".moved").rename(path.with_name(name))
    model, store, cache = restart("llama", address)
    serve(model, cache, BASE[:, :70])
    store.close()


# A server


def served_on(model: PreTrainedModel, tokenizer: Any, disk: str) -> ChunkStore:
    store = ChunkStore(model, chunk_size=32, tiers=[disk])
    engine = ModelEngine(model, tokenizer, store=store)
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        for _ in range(2):
            body = {"model": "reader", "prompt": "Anna lives in Oslo. The lamp is red. " * 10, "max_tokens": 2}
            answer = at.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
    engine.close()
    return store


@pytest.mark.parametrize("change", [no_sums, fewer_layers, no_blocks], ids=name_of)
def test_a_server_starts_and_answers_beside_forged_blobs(
    tmp_path: Path, disk: str, tokenizer: Any, change: Change
) -> None:
    model, _ = load_embedded()
    served_on(model, tokenizer, disk).close()
    made = change_all(tmp_path / "tier", forged(change))
    assert any(len(data) > 2**16 for data in made.values()), "large enough to be timed as the store is opened"
    store = served_on(model, tokenizer, disk)
    assert store.stats()["tiers"]["disk"]["errors"] > 0
    store.close()
