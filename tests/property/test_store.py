"""The store as a state machine: whatever is done to it, it keeps its budget, its pins and its word."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.conftest import make_model
from tests.internals.cache import (
    HEAD_TOKENS,
    MIN_MOVED_TOKENS,
    Block,
    Border,
    ChunkStore,
    ColumnForm,
    EvictionOrder,
    LayerKV,
    LayerKVReader,
    ModelForm,
    Put,
    StoredChunk,
    Tokens,
    common_length,
    content_only_key,
    find_moved,
    plan_row,
    prefix_key,
)

MODEL = make_model("llama")
BYTES_PER_TOKEN = 8
CHUNK = 16
CPU = torch.device("cpu")


KV_FORM = ModelForm((2 * (ColumnForm(1, 1, torch.float32, CPU),),), (None,))  # of what follows


def kv_of(tokens: Tokens, start: int) -> LayerKV:
    """K/V that tells which tokens, at which positions, it was computed for."""
    keys = torch.tensor(tokens, dtype=torch.float32)[None, :, None]
    values = torch.arange(start, start + len(tokens), dtype=torch.float32)[None, :, None]
    return LayerKV((Block.raw(torch.stack([keys, values])),), (((0, 0), (0, 1)),))


class StoreMachine(RuleBasedStateMachine):
    """Prompts are made of few words, so that they share beginnings."""

    def __init__(self) -> None:
        super().__init__()
        # Room for about ten chunks; the check of the constructor reckons with the real model's K/V.
        self.store = ChunkStore(MODEL, chunk_size=CHUNK, max_bytes=2**20)
        self.store.max_bytes = 10 * CHUNK * (BYTES_PER_TOKEN + 8)
        self.root = self.store.root(b"")
        self.other_root = self.store.root(b"somebody else")
        self.pinned: set[bytes] = set()
        self.pinned_content: set[tuple[bytes, bytes]] = set()  # roots and tokens
        self.puts = 0

    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5)

    def tokens(self, words: list[int]) -> Tokens:
        return np.concatenate([np.full(11, 10 + word) for word in words])

    def put_all(self, tokens: Tokens, *, pinned: bool = False, tail: bool = True) -> None:
        border = Border(0, self.root)
        while border.at < len(tokens):
            cut = self.store.chunker.next_cut(tokens, border.at) or len(tokens)
            part = tokens[border.at : cut]
            if len(part) < CHUNK and (not tail or len(part) < HEAD_TOKENS):
                return
            start = border.at
            result = self.store.put(
                self.root,
                border.key,
                start,
                part,
                BYTES_PER_TOKEN * len(part),
                partial(kv_of, part, start),
                pinned=pinned,
                unfinished=len(part) < CHUNK,
            )
            self.puts += 1
            key = prefix_key(border.key, part)
            if pinned and result in (Put.STORED, Put.PRESENT):
                self.pinned.add(key)
            if result in (Put.NO_PARENT, Put.NO_ROOM):
                assert result is not Put.NO_ROOM or self.store.stats()["pinned_chunks"] or border.at
                return
            border = Border(cut, key)

    @rule(words=prompts)
    def put(self, words: list[int]) -> None:
        self.put_all(self.tokens(words))

    @precondition(lambda self: len(self.pinned) < 4)
    @rule(words=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def put_pinned(self, words: list[int]) -> None:
        self.put_all(self.tokens(words), pinned=True, tail=False)

    @precondition(lambda self: len(self.pinned) + len(self.pinned_content) < 4)
    @rule(words=prompts, start=st.integers(0, 40), other=st.booleans(), pinned=st.booleans(), linked=st.booleans())
    def put_content(self, words: list[int], start: int, other: bool, pinned: bool, linked: bool) -> None:
        root = self.other_root if other else self.root
        tokens = self.tokens(words)
        parent = b"history" if linked else None
        for at in range(0, len(tokens), CHUNK):
            part = tokens[at : at + CHUNK]
            result = self.store.put_content(
                root,
                part,
                start + at,
                BYTES_PER_TOKEN * len(part),
                partial(kv_of, part, start + at),
                parent=parent,
                pinned=pinned,
            )
            self.puts += 1
            if len(part) < MIN_MOVED_TOKENS:
                assert result is Put.TOO_SHORT
                return
            assert result in (Put.STORED, Put.PRESENT, Put.NO_ROOM)
            found = self.store.moved_index(root).variants(part)
            if result is not Put.NO_ROOM:
                assert found[0].start <= start + at
                if pinned:
                    self.pinned_content.add((root, part.tobytes()))
            parent = content_only_key(root, parent, start + at, part) if parent is not None else None

    @rule(words=prompts, other=st.booleans())
    def look_up_moved(self, words: list[int], other: bool) -> None:
        root = self.other_root if other else self.root
        tokens = np.concatenate([[99], self.tokens(words)])
        for segment in find_moved(tokens, 0, len(tokens), self.store.moved_index(root)):
            assert isinstance(segment.chunk, StoredChunk)
            assert segment.chunk.root == root
            keys, values = LayerKVReader(segment.chunk.kv).layer(0)
            part = slice(segment.offset, segment.offset + segment.stop - segment.start)
            assert keys[0, part, 0].tolist() == tokens[segment.start : segment.stop].tolist()
            positions = range(segment.start - segment.shift, segment.stop - segment.shift)
            assert values[0, part, 0].tolist() == list(positions)

    @rule(pick=st.integers(0, 1000))
    def quarantine(self, pick: int) -> None:
        loose = sorted(
            chunk.key
            for chunk in self.store.inspect().chunks.values()
            if chunk.content_only and chunk.key not in self.store.pinned_keys()
        )
        if not loose:
            return
        chunks, doomed = self.store.inspect().chunks, {loose[pick % len(loose)]}
        while more := {chunk.key for chunk in chunks.values() if chunk.parent in doomed} - doomed:
            doomed |= more  # what continues wrong K/V goes with it, pinned or not
        pinned = self.store.pinned_keys()
        self.pinned_content = {
            (root, text)
            for root, text in self.pinned_content
            if not any(
                variant.key in doomed & pinned
                for variant in self.store.moved_index(root).variants(np.frombuffer(text, dtype=np.int64))
            )
        }
        self.store.quarantine([loose[pick % len(loose)]])
        assert doomed.isdisjoint(self.store.inspect().chunks)

    @rule(words=prompts)
    def look_up(self, words: list[int]) -> None:
        tokens = self.tokens(words)
        border, chunker = Border(0, self.root), self.store.chunker
        index = self.store.view(self.root, tokens, border)
        plan = plan_row(tokens, 0, border, len(tokens) - 1, chunker, index)
        for segment in plan.segments:
            assert not segment.chunk.content_only
            part = slice(segment.offset, segment.offset + segment.stop - segment.start)
            keys, values = LayerKVReader(segment.chunk.kv).layer(0)  # type: ignore[attr-defined]
            assert keys[0, part, 0].tolist() == tokens[segment.start : segment.stop].tolist()
            assert values[0, part, 0].tolist() == list(range(segment.start, segment.stop))
        self.store.record_use([s.chunk for s in plan.segments], missed=plan.miss is not None)

    @rule(words=prompts)
    def fail_to_copy(self, words: list[int]) -> None:
        tokens = 50 + self.tokens(words)[:CHUNK]
        if len(tokens) < CHUNK:
            return

        def interrupted() -> LayerKV:
            raise KeyboardInterrupt

        before = self.store.stats()["bytes"]
        try:
            self.store.put(self.root, self.root, 0, tokens, BYTES_PER_TOKEN * CHUNK, interrupted)
        except KeyboardInterrupt:
            assert self.store.stats()["bytes"] <= before

    @rule()
    def clear(self) -> None:
        if self.puts > 60:
            self.store.clear()
            self.pinned.clear()
            self.pinned_content.clear()
            self.puts = 0

    @invariant()
    def its_books_agree(self) -> None:
        self.store.check_consistency()
        contents = self.store.inspect()
        assert contents.nbytes == self.store.stats()["bytes"] == sum(c.nbytes for c in contents.chunks.values())

    @invariant()
    def pinned_chunks_are_there(self) -> None:
        for key in self.pinned:
            assert key in self.store.inspect().chunks or self._covered(key)

    def _covered(self, key: bytes) -> bool:
        return any(key in {c.key, c.parent} for c in self.store.inspect().chunks.values())

    @rule(salt=st.sampled_from([b"", b"somebody else"]))
    def look_up_text(self, salt: bytes) -> None:
        """From the first time on, text is kept of every chunk."""
        self.store.continuation([10] * 8, 4, salt=salt)

    @invariant()
    def content_only_chunks_have_no_prefix(self) -> None:
        for chunk in self.store.inspect().chunks.values():
            if chunk.content_only:
                view = self.store.view(chunk.root, chunk.tokens)
                assert view.find(chunk.key, chunk.tokens) is None

    @invariant()
    def one_content_only_chunk_at_most_and_none_beside_a_better_one(self) -> None:
        for chunk in self.store.inspect().chunks.values():
            if chunk.content_only:
                others = self.store.moved_index(chunk.root).variants(chunk.tokens)
                assert [c for c in others if c.content_only] == [chunk]
                assert others[0] is chunk

    @invariant()
    def pinned_contents_are_there(self) -> None:
        for root, text in self.pinned_content:
            variants = self.store.moved_index(root).variants(np.frombuffer(text, dtype=np.int64))
            assert any(c.key in self.store.pinned_keys() or self._covered(c.key) for c in variants)

    @invariant()
    def no_chunk_holds_what_a_longer_one_holds(self) -> None:
        chunks = [chunk for chunk in self.store.inspect().chunks.values() if not chunk.content_only]
        continued = {chunk.parent for chunk in chunks}
        for a in chunks:
            for b in chunks:
                if a is not b and a.parent == b.parent and a.key not in continued:
                    assert common_length(a.tokens, b.tokens) < len(a.tokens)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class EvictionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder()
        self.parents: dict[bytes, bytes | None] = {}
        self.pinned: set[bytes] = set()
        self.next = 0

    @rule(pick=st.integers(0, 1000), root=st.booleans())
    def add(self, pick: int, root: bool) -> None:
        parent = None if root or not self.parents else sorted(self.parents)[pick % len(self.parents)]
        key = self.next.to_bytes(4, "big")
        self.next += 1
        self.order.add(key, parent)
        self.parents[key] = parent

    @precondition(lambda self: self.parents)
    @rule(pick=st.integers(0, 1000))
    def touch(self, pick: int) -> None:
        self.order.touch(sorted(self.parents)[pick % len(self.parents)])

    @precondition(lambda self: self.parents)
    @rule(pick=st.integers(0, 1000), pin=st.booleans())
    def pin(self, pick: int, pin: bool) -> None:
        key = sorted(self.parents)[pick % len(self.parents)]
        (self.order.pin if pin else self.order.unpin)(key)
        (self.pinned.add if pin else self.pinned.discard)(key)

    @rule(pick=st.integers(0, 1000))
    def evict(self, pick: int) -> None:
        keep = sorted(self.parents)[pick % len(self.parents)] if self.parents else None
        leaves = set(self.parents) - set(self.parents.values()) - self.pinned - {keep}
        victim = self.order.victim(keep=keep)
        assert (victim is None) == (not leaves)
        if victim is not None:
            assert victim in leaves
            del self.parents[victim]

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.order) == len(self.parents)


TestEviction = EvictionMachine.TestCase
TestEviction.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_order_of_eviction() -> None:
    order = EvictionOrder()
    for name in (b"often", b"once", b"new"):
        order.add(name, None)
    order.add(b"leaf of often", b"often")
    order.touch(b"often")
    order.touch(b"leaf of often")
    order.touch(b"leaf of often")
    order.touch(b"new")
    assert [order.victim() for _ in range(5)] == [b"once", b"new", b"leaf of often", b"often", None]


def test_a_use_counts_half_after_sixteen_uses_of_each() -> None:
    order = EvictionOrder()
    for name in (b"used", b"other"):
        order.add(name, None)
    for _ in range(30):
        order.touch(b"other")
    order.next_prompt()
    known = 1 - 2 ** (-33 / 32)  # of all uses, those since it came, with one more
    assert order.rate(b"used") == pytest.approx(0.5 / known)
    order.touch(b"used")
    assert order.rate(b"used") == pytest.approx(1.5 / known)


def test_uses_are_remembered_of_what_was_given_up() -> None:
    order = EvictionOrder(lambda key: b"text" if b"key" in key else key)
    order.add(b"key", None)
    for _ in range(5):
        order.touch(b"key")
    order.remove(b"key")
    for i in range(40):
        order.add(b"%d" % i, None)
    order.add(b"another key", None)
    order.add(b"last", None)
    victims = [order.victim() for _ in range(30)]
    assert b"another key" not in victims


def test_the_popular_stay_and_new_ones_get_their_time() -> None:
    """Documents by Zipf's law: better than the least recently used ones by far, near the most popular ones."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, 101)
    order, recent = EvictionOrder(), list[int]()
    hits = {"ours": 0, "recent": 0, "popular": 0}
    for step, drawn in enumerate(rng.choice(100, 6000, p=weights / weights.sum()).tolist()):
        key = b"%d" % drawn
        if step >= 2000:
            hits["ours"] += key in order
            hits["recent"] += drawn in recent
            hits["popular"] += drawn < 30
        order.next_prompt()
        if key in order:
            order.touch(key)
        else:
            order.add(key, None)
            if len(order) > 30:
                order.victim(keep=key)
        recent = [drawn, *(other for other in recent if other != drawn)][:30]
    assert hits["ours"] > 0.96 * hits["popular"] > 1.1 * hits["recent"], hits


def test_ancestors_go_first_only_where_chunks_are_found_by_content() -> None:
    for by_content in (False, True):
        order = EvictionOrder()
        order.by_content = by_content
        order.add(b"unpopular", None)
        order.add(b"popular", b"unpopular")
        for _ in range(9):
            order.next_prompt()
            order.touch(b"popular")
        order.add(b"pinned", None, pinned=True)
        assert order.victim(keep=b"popular") is None  # its ancestor stays as long as it is kept
        assert order.victim() == (b"unpopular" if by_content else b"popular")
        assert order.is_leaf(b"popular" if by_content else b"unpopular")


def test_what_was_popular_ages() -> None:
    order = EvictionOrder()
    order.add(b"popular", None)
    for _ in range(5):
        order.touch(b"popular")
    victims = []
    for i in range(20):
        order.next_prompt()
        order.add(b"%d" % i, None)
        if len(order) > 3:
            victims.append(order.victim())
    assert b"popular" in victims
