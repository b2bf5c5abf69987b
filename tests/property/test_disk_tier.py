"""The disk tier as a state machine: whatever is done to it, it does what a simple model does."""

import os
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.blobs import is_right, key_of, make_blob
from tests.internals.disk import DiskTier, charge

MAX_BYTES = 16_000  # about six blobs
NOBODY = 2**31 - 1  # no process has this number


DEAD = "dead" * 8  # the token of a killed writer


class DiskTierMachine(RuleBasedStateMachine):
    """Texts are chains of four blobs, each of which continues the one before."""

    numbers = st.integers(0, 11)

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.tiers = [DiskTier(self.folder, MAX_BYTES) for _ in range(2)]
        self.kept: dict[int, tuple[int, int]] = {}  # number -> when it was used last, and what it is charged
        self.uses: dict[int, int] = {}
        self.time = 0

    @property
    def tier(self) -> DiskTier:
        """One of two handles, in turn."""
        self.tiers.reverse()
        return self.tiers[0]

    @rule(n=numbers, size=st.integers(0, 1500))
    def write(self, n: int, size: int) -> None:
        parent = n - 1 if n % 4 else None
        told = {"parent": key_of(parent)} if parent is not None else {}
        entry, blob = make_blob(n, size, start=16 * (n % 4), **told)  # type: ignore[arg-type]
        expected = n in self.kept or self.give_up_for(charge(entry, entry.nbytes), parent)
        assert self.tier.write(entry, blob) is expected
        if expected and n not in self.kept:
            self.time += 1
            used = self.kept[parent][0] if parent in self.kept else self.time
            self.kept[n] = (used, charge(entry, entry.nbytes))

    def give_up_for(self, needed: int, parent: int | None) -> bool:
        short = sum(charged for _, charged in self.kept.values()) + needed - MAX_BYTES
        gone = []
        for n in sorted(self.kept, key=lambda n: (self.kept[n][0], -(n % 4))):
            if short <= 0:
                break
            if n == parent:
                return False
            gone.append(n)
            short -= self.kept[n][1]
        for n in gone:
            self.forget(n)
        return short <= 0

    def forget(self, n: int) -> None:
        self.kept.pop(n, None)
        self.uses.pop(n, None)

    @rule(n=numbers)
    def read(self, n: int) -> None:
        blob = self.tier.read(key_of(n))
        assert (blob is not None) == (n in self.kept)
        assert blob is None or is_right(key_of(n), blob)

    @rule(some=st.sets(numbers, max_size=5))
    def touch(self, some: set[int]) -> None:
        self.tier.touch([key_of(n) for n in some])
        self.time += 1
        for n in some & set(self.kept):
            self.kept[n] = (self.time, self.kept[n][1])
            self.uses[n] = self.uses.get(n, 0) + 1

    @rule(some=st.sets(numbers, max_size=3))
    def delete(self, some: set[int]) -> None:
        self.tier.delete(key_of(n) for n in some)
        for n in some:
            self.forget(n)

    @rule(n=numbers, harm=st.sampled_from(["remove", "cut"]))
    def lose_a_file(self, n: int, harm: str) -> None:
        if n in self.kept:
            path = self.file(n)
            path.unlink() if harm == "remove" else os.truncate(path, 10)
            assert self.tier.read(key_of(n)) is None
            self.forget(n)

    @rule(n=numbers, at=st.sampled_from(["reserved", "written", "renamed", "deleting"]))
    def crash(self, n: int, at: str) -> None:
        """Leave what a killed process leaves, and start again."""
        if at == "deleting":
            if n in self.kept:
                self.file(n).unlink()
                self.forget(n)
        elif n in self.kept:
            self.sql(f"UPDATE blobs SET token = '{DEAD}', host = ?, pid = ?, since = 0 WHERE key = ?", n)
            if at != "renamed":
                os.replace(self.file(n), self.file(n, DEAD))
                self.forget(n)
            if at == "reserved":
                self.file(n, DEAD).write_bytes(b"")
        else:
            self.file(n).parent.mkdir(parents=True, exist_ok=True)
            self.file(n, DEAD).write_bytes(b"begun")
        self.reopen()
        assert not list(self.folder.rglob("*.tmp"))

    @rule(n=numbers)
    def lose_a_row(self, n: int) -> None:
        """As a power failure may; the blob is taken in again, and counts as used when it was written."""
        if n in self.kept:
            self.tier.touch([key_of(n)])
            self.time += 1
            self.kept[n] = (self.time, self.kept[n][1])
            self.sql("DELETE FROM blobs WHERE ? != ? AND key = ?", n)
            parent = n - 1 if n % 4 else None
            os.utime(self.file(n), ns=(time.time_ns(),) * 2)
            self.reopen()
            if parent in self.kept:
                self.kept[n] = (self.kept[parent][0], self.kept[n][1])
            self.uses.pop(n, None)

    @rule()
    def reopen(self) -> None:
        for tier in self.tiers:
            tier.close()
        self.tiers = [DiskTier(self.folder, MAX_BYTES) for _ in range(2)]

    @invariant()
    def agrees(self) -> None:
        tier = self.tier
        keys = {key_of(n) for n in self.kept}
        assert set(tier.find([key_of(n) for n in range(12)])) == keys
        assert {entry.key for entry in tier.entries()} == keys
        assert {entry.key for entry in tier.find_alike([b"head"])} == keys
        assert tier.hits() == {key_of(n): uses for n, uses in self.uses.items()}
        stats = tier.stats()
        assert (stats["chunks"], stats["errors"]) == (len(keys), 0)
        assert stats["bytes"] == sum(charged for _, charged in self.kept.values())
        files = [path.stat().st_size for path in self.folder.rglob("*.safetensors")]
        assert len(files) == len(keys)
        assert sum(files) <= int(stats["bytes"]) <= MAX_BYTES

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.close()
        shutil.rmtree(self.folder)

    def file(self, n: int, token: str | None = None) -> Path:
        name = key_of(n).hex()
        suffix = "safetensors" if token is None else f"{token}.tmp"
        return self.folder / "blobs" / name[:2] / f"{name}.{suffix}"

    def sql(self, statement: str, n: int) -> None:
        db = sqlite3.connect(self.folder / "index.sqlite3")
        with db:
            db.execute(statement, (os.uname().nodename, NOBODY, key_of(n)))
        db.close()


TestDiskTier = DiskTierMachine.TestCase
TestDiskTier.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
