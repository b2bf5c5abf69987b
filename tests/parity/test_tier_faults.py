"""Whatever happens to a tier in mid-use: no exception out of generate(), no other token, and reuse afterwards."""

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, attach, detach, last_cache
from tests.conftest import as_inputs, counted, random_ids
from tests.internals.cache import FilesystemTier, Put, ValkeyTier
from tests.internals.disk import DiskTier
from tests.parity.test_loading import blobs
from tests.parity.test_tiers import BASE, fill, generate, restart, serve
from tests.servers import BINARY, Server
from tests.unit.test_tiered_store import Recording

needs_server = pytest.mark.skipif(BINARY is None, reason="neither valkey-server nor redis-server is on the PATH")


pytestmark = pytest.mark.usefixtures("loading_is_worth_it")


def put_right(name: str, address: str, reused: int = 149) -> None:
    """After a fault what was computed is stored again, and found after a restart."""
    fill(name, address, BASE)
    model, store, cache = restart(name, address)
    assert serve(model, cache, BASE).reused_tokens == reused
    store.close()


@pytest.mark.parametrize("place", [0, 7, 30, 200, 900, 0.5, 0.8, -1])
@pytest.mark.parametrize("which", [0, 3])
def test_a_flipped_byte(tmp_path: Path, disk: str, place: float, which: int) -> None:
    fill("llama", disk, BASE)
    harmed = blobs(tmp_path)[which]
    data = bytearray(harmed.read_bytes())
    data[int(place * len(data)) if isinstance(place, float) else place] ^= 0x40
    harmed.write_bytes(data)
    model, store, cache = restart("llama", disk)
    report = serve(model, cache, BASE)
    assert 0 <= report.reused_tokens < 149
    assert store.stats()["lost"] == 1
    store.close()
    put_right("llama", disk)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("llama", Path.unlink),
        ("llama", lambda path: os.truncate(path, 100)),
        ("llama", lambda path: os.truncate(path, 0)),
        ("qwen3_next", Path.unlink),
    ],
)
def test_files_that_are_lost_between_find_and_read(
    tmp_path: Path, disk: str, name: str, harm: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(name, disk, BASE)
    reused = []
    for which in range(len(blobs(tmp_path))):
        model, store, cache = restart(name, disk)
        find, harmed = DiskTier.find, blobs(tmp_path)[which]

        def find_and_lose(self: DiskTier, keys: Any, find: Any = find, harmed: Path = harmed) -> Any:
            found = find(self, keys)
            if harmed.exists() and harmed.stat().st_size > 100:
                harm(harmed)
            return found

        with monkeypatch.context() as patched:
            patched.setattr(DiskTier, "find", find_and_lose)
            reused.append(serve(model, cache, BASE).reused_tokens)
        cache.reset()
        store.close()
    assert min(reused) < 100  # not every file is one that is wanted
    put_right(name, disk)


def test_a_full_disk(disk: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model, store, cache = restart("llama", disk)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr("kvboost_hf.cache.tiers.disk_files.os.replace", full)
        for reused in (0, 149):
            assert serve(model, cache, BASE).reused_tokens == reused
            cache.reset()
        store.flush()
    assert store.stats()["tiers"]["disk"]["chunks"] == 0
    assert "No space left on device" in caplog.text
    store.close()
    put_right("llama", disk)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path, disk: str) -> None:
    fill("llama", disk, BASE)
    folders = [tmp_path / "tier", *(path for path in (tmp_path / "tier").rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o500)
    try:
        model, store, cache = restart("llama", disk)
        assert serve(model, cache, BASE).reused_tokens == 149
        assert serve(model, cache, random_ids(90, seed=5)).reused_tokens == 0
        store.close()
    finally:
        for path in folders:
            path.chmod(0o700)


def test_a_folder_that_is_only_read(
    tmp_path: Path, disk: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill("llama", disk, BASE)
    before = {path: path.read_bytes() for path in blobs(tmp_path)}
    monkeypatch.setattr("kvboost_hf.cache.tiers.disk.is_writable", lambda folder: False)
    model, store, cache = restart("llama", disk)
    assert "it is only read" in caplog.text
    assert serve(model, cache, BASE).reused_tokens == 149
    assert serve(model, cache, random_ids(90, seed=5)).reused_tokens == 0
    cache.reset()
    store.close()
    assert {path: path.read_bytes() for path in blobs(tmp_path)} == before


def test_damage_in_a_folder_that_is_only_read(tmp_path: Path, disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be taken away, and must not be tried for ever."""
    fill("llama", disk, BASE)
    for path in blobs(tmp_path):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    monkeypatch.setattr("kvboost_hf.cache.tiers.disk.is_writable", lambda folder: False)
    model, store, cache = restart("llama", disk)
    for policy in (ReusePolicy(), ReusePolicy(mode="blend", repair="first_k", recompute_ratio=1.0)):
        cache = ChunkReuseCache(model, store, policy)
        assert serve(model, cache, BASE, atol=1e-3).reused_tokens == 0
        store.clear()  # of host memory: the folder cannot be written to
    store.close()


def test_a_folder_that_is_removed_in_mid_use(tmp_path: Path, disk: str, caplog: pytest.LogCaptureFixture) -> None:
    fill("llama", disk, BASE)
    model, store, cache = restart("llama", disk)
    shutil.rmtree(tmp_path / "tier")
    assert serve(model, cache, BASE).reused_tokens == 0
    cache.reset()
    store.flush()
    assert serve(model, cache, BASE).tier_tokens["ram"] == 149  # and host memory goes on
    store.close()
    put_right("llama", disk)


@pytest.mark.parametrize("how", ["clear", "quarantine"])
@pytest.mark.parametrize("kind", ["disk", "filesystem"])
def test_what_a_tier_did_not_delete_is_not_found(
    tmp_path: Path, disk: str, kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it does so: what is wrong must not serve again."""
    address = disk if kind == "disk" else f"memory://{tmp_path.name}"
    fill("llama", address, BASE)
    model, _, _ = restart("llama", disk)
    tier = DiskTier(tmp_path / "tier", 10**9) if kind == "disk" else FilesystemTier(address, cooldown_s=0.01)
    store = ChunkStore(model, chunk_size=32, tiers=[tier])

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("kvboost_hf.cache.tiers.disk.DiskIndex.transaction", full)
        patched.setattr("kvboost_hf.cache.tiers.filesystem.FilesystemTier._remove", full)
        if how == "clear":
            store.clear()
        else:
            store.quarantine([entry.key for entry in tier.entries()])
        assert store.owing == [tier.name]
        time.sleep(0.1)  # then a tier that has failed is asked again
        assert serve(model, ChunkReuseCache(model, store), BASE).reused_tokens == 0
    time.sleep(0.1)
    store.hear()
    assert not store.owing
    assert not list(tier.entries())
    store.close()
    tier.close()
    put_right("llama", address)


# Servers


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("valkey")
    server = Server(tmp_path)
    yield server
    server.stop()


def on_server(model: PreTrainedModel, url: str) -> ChunkStore:
    tier = ValkeyTier(url, timeout_s=0.5, cooldown_s=0.05)
    return ChunkStore(model, chunk_size=32, tiers=[tier])


@needs_server
def test_a_restart_with_a_server(server: Server) -> None:
    address = f"{server.url}"
    fill("llama", address, BASE)
    model, store, cache = restart("llama", address)
    assert serve(model, cache, BASE).tier_tokens["valkey"] == 149
    store.flush()
    assert serve(model, ChunkReuseCache(model, store), BASE).tier_tokens["ram"] == 149
    store.close()


@needs_server
@pytest.mark.parametrize("killed", [True, False])
def test_a_server_that_is_gone_in_mid_use(server: Server, caplog: pytest.LogCaptureFixture, killed: bool) -> None:
    fill("llama", server.url, BASE)
    model, _, _ = restart("llama", server.url)
    store = on_server(model, server.url)
    with caplog.at_level(logging.WARNING):
        (server.stop if killed else server.stall)()
        for seed in (1, 2):
            cache = ChunkReuseCache(model, store)
            assert serve(model, cache, random_ids(150, seed=seed)).reused_tokens == 0
            cache.reset()
        store.flush()
    assert "failed, and is left alone for a while" in caplog.text
    (server.start if killed else server.go_on)()
    for _ in range(200):  # whatever it was told meanwhile is lost; what comes now is not
        other = ChunkReuseCache(model, store)
        generate(model, as_inputs(random_ids(64, seed=_ + 50)), other, max_new_tokens=1)
        store.flush()
        if store.stats()["tiers"]["valkey"]["state"] == "open":
            break
    cache = ChunkReuseCache(model, store)
    ids = random_ids(150, seed=3)
    assert serve(model, cache, ids).reused_tokens == 0
    cache.reset()
    store.close()
    model, store, cache = restart("llama", server.url)
    assert serve(model, cache, ids).tier_tokens["valkey"] == 149
    store.close()


def test_two_tiers_and_one_of_them_damaged(tmp_path: Path, disk: str) -> None:
    """What the nearer one has lost, the other one has; and what comes from there is written to the nearer one."""
    place = f"memory://{tmp_path.name}"
    model, _, _ = restart("llama", disk)
    store = ChunkStore(model, chunk_size=32, tiers=[disk, place])
    cache = ChunkReuseCache(model, store)
    serve(model, cache, BASE)
    cache.reset()
    store.close()
    names = {path.name for path in blobs(tmp_path)}
    for path in blobs(tmp_path):
        path.unlink()
    store = ChunkStore(model, chunk_size=32, tiers=[disk, place])
    cache = ChunkReuseCache(model, store)
    assert serve(model, cache, BASE).tier_tokens["filesystem"] == 149
    store.flush()
    assert {path.name for path in blobs(tmp_path)} >= names
    store.close()


# Audits


def test_an_audit_takes_wrong_chunks_out_of_every_tier(disk: str) -> None:
    """K/V that is wrong, with checksums that are right: nothing but an audit can tell."""
    model, store, cache = restart("llama", disk)
    serve(model, cache, BASE)
    cache.reset()
    for chunk in store.inspect().chunks.values():
        for tensor in chunk.kv.tensors:
            tensor.add_(0.5)
    wrong = store.inspect().chunks.values()
    store.clear()
    for chunk in wrong:
        place = (chunk.root, chunk.parent, chunk.start, chunk.tokens)
        assert store.put(*place, chunk.kv.nbytes, partial(lambda kv: kv, chunk.kv)) is Put.STORED
    store.close()
    for rate, reused in ((1.0, 149), (0.0, 128)):  # what took their place is right
        model, store, _ = restart("llama", disk)
        cache = ChunkReuseCache(model, store, ReusePolicy(audit_rate=rate))
        plain = generate(model, as_inputs(BASE))
        found = generate(model, as_inputs(BASE), cache)
        assert found.sequences.tolist() == plain.sequences.tolist()
        assert cache.report.reused_tokens == reused
        assert store.stats()["quarantined"] == (5 if rate else 0)
        store.close()


# Tenants


def work_of(model: PreTrainedModel, store: ChunkStore, tier: Recording, ids: torch.Tensor, salt: str) -> Any:
    """Tokens that are computed, and what the tier is asked, without the keys."""
    store.flush()
    tier.calls.clear()
    cache = ChunkReuseCache(model, store, salt=salt)
    with counted(model) as work:
        generate(model, as_inputs(ids), cache)
        cache.reset()
        store.flush()
    return work.tokens, work.calls, list(tier.calls), cache.report.tier_tokens


@pytest.mark.parametrize("policy", [ReusePolicy(), ReusePolicy(mode="blend", min_prefill_saving=0)])
def test_tenants_cannot_tell_what_others_have_asked(tmp_path: Path, policy: ReusePolicy) -> None:
    model, _, _ = restart("llama", f"disk:{tmp_path / 'unused'}")
    for near in (False, True):  # with the other tenant's K/V in a tier only, and in host memory, too
        folder = tmp_path / str(near)
        tier = Recording(DiskTier(folder, 10**9))
        store = ChunkStore(model, chunk_size=32, tiers=[tier])
        cache = ChunkReuseCache(model, store, policy, salt="one")
        generate(model, as_inputs(BASE), cache)
        cache.reset()
        if not near:
            store.close()
            tier = Recording(DiskTier(folder, 10**9))
            store = ChunkStore(model, chunk_size=32, tiers=[tier])
        known = {entry.key for entry in tier.inner.entries()}
        first = work_of(model, store, tier, random_ids(150, seed=77), "two")
        tier.keys.clear()
        stored = work_of(model, store, tier, BASE, "two")
        unseen = work_of(model, store, tier, random_ids(150, seed=78), "two")
        assert stored == unseen == first
        assert not tier.keys & known
        store.close()


def test_a_salt_for_each_request(disk: str) -> None:
    model, store, cache = restart("llama", disk)
    for salt, reused in (("one", 0), ("two", 0), ("one", 149), ("two", 149), ("", 0)):
        cache.salt = salt
        assert serve(model, cache, BASE).reused_tokens == reused
    store.close()
    model, store, cache = restart("llama", disk)
    for salt, reused in (("three", 0), ("two", 149), ("one", 149)):
        cache.salt = salt
        assert serve(model, cache, BASE).reused_tokens == reused
    cache.reset()
    store.close()


def test_a_salt_for_each_attached_call(disk: str) -> None:
    model, store, _ = restart("llama", disk)
    who = ["one"]
    attach(model, store, salt=lambda: who[0])
    for tenant, reused in (("one", 0), ("two", 0), ("one", 149), ("two", 149)):
        who[0] = tenant
        model.generate(**as_inputs(BASE), max_new_tokens=2)
        cache = last_cache(model)
        assert cache is not None
        assert cache.report.reused_tokens == reused
    detach(model)
    store.close()


def test_files_in_memory_that_are_lost(tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}"
    fill("llama", place, BASE)
    model, store, cache = restart("llama", place)
    for entry in (doomed := FilesystemTier(place)).entries():
        doomed.delete([entry.key])
    doomed.close()
    assert serve(model, cache, BASE).reused_tokens == 0
    cache.reset()
    store.close()
    put_right("llama", place)
