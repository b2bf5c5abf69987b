"""GrowingLayer against DynamicLayer, and the record of ids beside it."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from kvboost_hf import ChunkReuseCache
from tests.conftest import make_model
from tests.internals.cache import Behind, GrowingLayer, MaskShape, TokenLog, _carry, _KeptStates

pytestmark = pytest.mark.daily

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 150)),
        st.tuples(st.just("crop"), st.integers(0, 40)),
        st.tuples(st.just("reorder"), st.integers(0, 7)),
        st.tuples(st.just("repeat"), st.just(2)),
        st.tuples(st.just("share"), st.booleans()),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(OPERATIONS)
def test_growing_layer_does_what_dynamic_layer_does(operations: list[tuple[str, int]]) -> None:
    stock, ours = DynamicLayer(), GrowingLayer()
    twins: list[tuple[GrowingLayer, torch.Tensor]] = []
    batch = 2
    generator = torch.Generator().manual_seed(0)
    for name, n in [("update", 3), *operations]:
        if name == "update":
            k, v = torch.randn(2, batch, 2, n, 4, generator=generator)
            expected, found = stock.update(k, v), ours.update(k, v)
            assert torch.equal(expected[0], found[0])
            assert torch.equal(expected[1], found[1])
        elif name == "crop":
            n = min(n, stock.get_seq_length())
            stock.crop(-n)
            ours.crop(-n)
        elif name == "reorder":
            rows = torch.randint(0, batch, (batch,), generator=generator)
            if stock.get_seq_length():
                stock.reorder_cache(rows)  # type: ignore[arg-type]
                ours.reorder_cache(rows)  # type: ignore[arg-type]
        elif name == "repeat" and batch < 8 and stock.get_seq_length():
            batch *= n
            stock.batch_repeat_interleave(n)
            ours.batch_repeat_interleave(n)
        elif name == "share":
            twin = ours.share()
            if n:
                ours, twin = twin, ours
            twins.append((twin, twin.keys.clone()))
        assert ours.get_seq_length() == stock.get_seq_length()
        assert ours.get_mask_sizes(3) == stock.get_mask_sizes(3)
        assert torch.equal(ours.keys, stock.keys)
        assert torch.equal(ours.values, stock.values)
    for twin, before in twins:  # what was forked off never changes
        assert torch.equal(twin.keys, before)


@torch.no_grad()
def test_appends_are_in_place() -> None:
    layer = GrowingLayer()
    keys, _ = layer.update(torch.zeros(1, 2, 1000, 4), torch.zeros(1, 2, 1000, 4))
    address, copies = keys.data_ptr(), 0
    for _ in range(1000):
        keys, _ = layer.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
        copies += keys.data_ptr() != address
        address = keys.data_ptr()
    assert copies <= 7
    assert layer.nbytes <= 2 * 2 * 4 * 4 * 2000 * 1.2


def test_buffers_from_inference_mode_can_be_appended_to_outside() -> None:
    layer = GrowingLayer()
    with torch.inference_mode():
        layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
        layer.reorder_cache(torch.tensor([0]))  # type: ignore[arg-type]
    layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    assert layer.keys.sum() == 48


def test_with_gradients_nothing_is_overwritten() -> None:
    layer = GrowingLayer()
    k = torch.ones(1, 2, 3, 4, requires_grad=True)
    first, _ = layer.update(k * 2, k * 3)
    second, _ = layer.update(k * 5, k * 7)
    (first.square().sum() + second.square().sum()).backward()  # raises if a saved tensor was changed in place
    assert k.grad is not None
    with torch.no_grad():
        layer.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    assert layer.get_seq_length() == 7


def test_crop_takes_what_both_supported_releases_pass() -> None:
    layer = GrowingLayer()
    layer.update(torch.ones(1, 2, 8, 4), torch.ones(1, 2, 8, 4))
    layer.crop(torch.tensor(-3))  # type: ignore[arg-type]
    layer.crop(0)
    assert layer.get_seq_length() == 5
    layer.crop(9)
    assert layer.get_seq_length() == 5
    layer.crop(2)  # how many to keep, as older releases had it
    assert layer.get_seq_length() == 2


@pytest.mark.parametrize(("name", "size"), [("llama", 32), ("mistral", 32), ("qwen3_next", None), ("falcon_h1", None)])
@pytest.mark.parametrize("given", [-1.5, torch.tensor(-1.5), "3", None, torch.tensor([1, 2])])
def test_crop_takes_whole_columns_only(name: str, size: int | None, given: Any) -> None:
    """It cut numbers down: `crop(-1.5)` removed one column."""
    cache = ChunkReuseCache(make_model(name), max_cache_len=size)
    for target in (cache, *cache.layers):
        with pytest.raises(ValueError, match=r"`crop` takes an integer, got .*Pass minus the number of columns"):
            target.crop(given)


class TestTokenLog:
    def test_rows_leave_padding_out(self) -> None:
        log = TokenLog(np.array([0, 2]))
        log.append(torch.tensor([[1, 2, 3], [0, 0, 4]]))
        log.append(torch.tensor([[5], [6]]), torch.tensor([[3], [1]]))
        assert log.row(0).tolist() == [1, 2, 3, 5]
        assert log.row(1).tolist() == [4, 6]
        assert log.trusted

    def test_crop_and_select(self) -> None:
        log = TokenLog(np.array([0, 1]))
        log.append(torch.tensor([[1, 2, 3], [0, 5, 6]]))
        log.crop(2)
        log.select(np.array([1, 1]))
        log.extend(np.array([[7], [8]]))
        assert log.columns().tolist() == [[0, 5, 7], [0, 5, 8]]
        assert log.pads.tolist() == [1, 1]

    @pytest.mark.parametrize("positions", [[[4]], [[2]], [[0]]])
    def test_odd_positions_are_noticed(self, positions: list[list[int]]) -> None:
        log = TokenLog(np.array([0]))
        log.append(torch.tensor([[1, 2, 3]]))
        log.append(torch.tensor([[4]]), torch.tensor(positions))
        assert not log.trusted

    @pytest.mark.parametrize(
        ("mask", "trusted"),
        [([[0, 1, 1, 1]], True), ([[1, 1, 1, 1]], False), ([[0, 1, 0, 1]], False), ([[0] * 4], False)],
    )
    def test_odd_masks_are_noticed(self, mask: list[list[int]], trusted: bool) -> None:
        log = TokenLog(np.array([1]))
        log.append(torch.tensor([[0, 2, 3]]))
        log.append(torch.tensor([[4]]), None, MaskShape.of(torch.tensor(mask)))
        assert log.trusted is trusted

    def test_who_reads_it_meanwhile_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Such as whoever asks for a report while the K/V of the ids is computed again in another thread."""
        log, reserve = TokenLog(np.array([0])), TokenLog._reserve
        log.append(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 4]]))
        reached, go_on = threading.Event(), threading.Event()

        def halted(self: TokenLog, length: int) -> None:
            reached.set()
            assert go_on.wait(30)
            reserve(self, length)

        monkeypatch.setattr(TokenLog, "_reserve", halted)
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(log.columns)
            assert reached.wait(30)
            second, trusted = pool.submit(log.columns), pool.submit(lambda: log.trusted)
            wait((second, trusted), timeout=0.1)
            go_on.set()
            assert first.result().tolist() == second.result().tolist() == [[1, 2, 3]]
            assert not trusted.result()

    def test_an_interrupt_while_it_is_read_loses_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = TokenLog(np.array([0]))
        log.append(torch.tensor([[1, 2, 3]]))

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(TokenLog, "_reserve", interrupt)
            with pytest.raises(KeyboardInterrupt):
                log.columns()
        log.append(torch.tensor([[4]]), torch.tensor([[3]]))
        assert log.columns().tolist() == [[1, 2, 3, 4]]
        assert log.trusted


class Told:
    """What a `TokenLog` promises, column by column: ids, and whether each had its position and its history."""

    def __init__(self, pads: list[int]) -> None:
        self.pads, self.ids, self.trusted = pads, [list[int]() for _ in pads], True

    @property
    def length(self) -> int:
        return len(self.ids[0])


PLANES = st.sampled_from([0, 2, 3, 4])  # 0 for none, 2 for [batch, m]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_token_log_tells_what_it_was_told(data: st.DataObject) -> None:
    draw, random = data.draw, np.random.default_rng(data.draw(st.integers(0, 999)))
    told = Told(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    log = TokenLog(np.array(told.pads))
    for _ in range(draw(st.integers(1, 8))):
        batch, start = len(told.pads), told.length
        do = draw(st.sampled_from(["append"] * 4 + ["extend", "crop", "select", "copy", "read"]))
        if do in ("append", "extend"):
            m = draw(st.integers(1, 70))
            ids = random.integers(2, 90, (batch, m))
            if do == "extend":
                log.extend(ids)
            else:
                places = np.arange(start, start + m)[None] - np.array(told.pads)[:, None]
                kind, shift, wrong = draw(PLANES), 0, draw(st.sampled_from([False, False, False, True]))
                positions = places if kind == 2 else None
                at = draw(st.integers(0, batch - 1)), draw(st.integers(0, m - 1))
                if kind > 2:
                    shift = draw(st.integers(-2, 5))
                    planes = [places] * (kind == 4) + [places + shift] * 3
                    positions = np.stack(planes)
                if positions is not None and wrong:
                    positions = positions.copy()
                    which = draw(st.integers(0, kind - 1)) if kind > 2 else 0
                    positions[(which, *at) if kind > 2 else at] += 1
                    told.trusted &= bool(kind > 2 and places[at] < 0)
                mask = None
                if draw(st.booleans()):
                    known = np.arange(start + m)[None] >= np.array(told.pads)[:, None]
                    seen = known.copy()
                    if draw(st.sampled_from([False, False, False, True])):
                        seen[at[0], draw(st.integers(0, start + m - 1))] ^= True
                    if not seen.any(1).all():
                        seen[:] = True
                    told.trusted &= np.array_equal(seen, known)
                    mask = MaskShape.of(torch.from_numpy(seen.astype(np.int64)))
                given_ids = torch.from_numpy(ids.copy())
                given_positions = None if positions is None else torch.from_numpy(np.ascontiguousarray(positions))
                log.append(given_ids, given_positions, mask)
                given_ids.zero_()  # the caller writes the next step there
                if given_positions is not None:
                    given_positions.zero_()
                if kind > 2:
                    shifts = np.where(places >= 0, shift + (wrong and _by(kind, which, places.shape, at)), 0)
                    ids = ids + (shifts << 32)
            for row, new in zip(told.ids, ids.tolist(), strict=True):
                row += new
        elif do == "crop":
            length = draw(st.integers(0, start + 3))
            log.crop(length)
            told.ids = [row[:length] for row in told.ids]
        elif do == "select":
            rows = draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3))
            log.select(np.array(rows))
            told.ids, told.pads = [list(told.ids[row]) for row in rows], [told.pads[row] for row in rows]
        elif do == "copy":
            twin = log.copy()
            log.extend(np.full((batch, 1), 7))  # the other one goes its own way
            log.crop(0)
            log = twin
        if do != "append":
            assert log.columns().tolist() == told.ids
    assert (log.length, log.batch_size, log.pads.tolist()) == (told.length, len(told.pads), told.pads)
    assert log.columns().tolist() == told.ids
    assert [log.row(row).tolist() for row in range(len(told.pads))] == [
        ids[pad:] for ids, pad in zip(told.ids, told.pads, strict=True)
    ]
    assert log.trusted == told.trusted


def _by(kind: int, which: int, shape: tuple[int, ...], at: tuple[int, int]) -> np.ndarray:
    """How much the plane that a shift is read from has been made wrong by."""
    found = np.zeros(shape, dtype=np.int64)
    found[at] = which == (1 if kind == 4 else 0)
    return found


@pytest.mark.parametrize("shape", [(2,), (1,), (3, 2), (4, 1)])
def test_tokens_since_states_were_kept(shape: tuple[int, ...]) -> None:
    """Copies of ids and positions, up to a column; no positions if those of some are not known."""
    ids, positions = torch.arange(18).view(2, 9), torch.arange(9).expand(*shape, 9).clone()
    since, unknown = _KeptStates(5), _KeptStates(5)
    assert since.behind(9) is None
    for start, stop in ((0, 4), (4, 9)):
        given = ids[:, start:stop].clone(), positions[..., start:stop].clone()
        since.append(*given)
        unknown.append(given[0], given[1] if start else None)
        for each in given:
            each.zero_()
    assert since.behind(5) is None
    for stop in (6, 9, 14):
        found, other = since.behind(stop), unknown.behind(stop)
        assert found is not None
        assert other is not None
        assert found.positions is not None
        assert found.column == 5
        assert torch.equal(found.ids, ids[:, : stop - 5])
        assert torch.equal(found.positions, positions[..., : stop - 5])
        assert other.positions is None


@pytest.mark.parametrize("planes", [(), (3,)])
@pytest.mark.parametrize("known", [True, False])
def test_tokens_in_front_of_those_of_a_forward(known: bool, planes: tuple[int, ...]) -> None:
    """Positions that are not known, or of another form, go on backwards from those of the forward."""
    ids, own = torch.arange(6).view(2, 3), torch.arange(20, 24).view(2, 2)
    before, after = (torch.arange(*span).expand(*planes, 2, -1) for span in ((4, 7), (7, 9)))
    other = torch.zeros(2, 3) if planes else torch.zeros(3, 2, 3)
    for positions in (before,) if known else (None, other):
        behind = Behind(4, ids, positions)
        for keep, left in ((None, 2), (0, 2), (1, 1), (2, 2), (9, 2)):
            given = {"input_ids": own, "position_ids": after, "logits_to_keep": keep, "use_cache": True}
            found = _carry(given, behind)
            assert torch.equal(found["input_ids"], torch.cat([ids, own], dim=1))
            assert torch.equal(found["position_ids"], torch.cat([before, after], dim=-1))
            assert (found["logits_to_keep"], found["use_cache"]) == (left, True)
        assert "position_ids" not in _carry({"input_ids": own}, behind)
