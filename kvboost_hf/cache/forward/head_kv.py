"""K/V that heads of drafts compute of the text in a cache, found in its store and offered to it.

    chunks of the text     root ──▶ chunk ──▶ chunk ──▶ …
    those of its heads     root' ─▶ chunk ──▶ chunk      root' is made of root and of the weights of the heads

Chains of their own: a text that was stored without heads is served all the same, and its K/V is stored once for all
heads. Nobody finds what heads of other weights, or the model as it was before, have computed.
"""

import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.running import CacheParts
from kvboost_hf.cache.identity import ModelState
from kvboost_hf.cache.kv import Put, StoredChunk
from kvboost_hf.cache.kv.layer_kv import RAW, Block, LayerKV, LayerKVReader, Place
from kvboost_hf.cache.kv.model_form import ColumnForm, ModelForm
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, Tokens, prefix_key
from kvboost_hf.cache.planning.plan import Border
from kvboost_hf.compat import KeptOnModel, cache_layers, rope_regime
from kvboost_hf.device_link import on_host

Read = Callable[[int, int], Sequence[torch.Tensor]]

NOT_KEPT = "the cache keeps nothing of this text: it was moved, computed in pieces, or computed past the cache"
UNPAID = "the store keeps nothing of this text: storing has not paid, or there is no room"
CHANGED = "the heads have changed, or compute in another type, since the text was begun"
HOOKED = "hooks, or functions of others, run in the heads"
TRAINED = "the heads are in training mode"
LEFT = "columns have left the window of the heads before they were offered"
ANGLES = "the rotary frequencies of the heads change with the length of the text"


class HeadKV:
    """Keeps what heads compute of one text, chunk by chunk.

    The K/V of a column depends on the text up to its token, and on nothing behind it. `like` gives, for each tensor of
    the heads, one [1, heads, columns, dim] of the same form; `settle` has the last forward of the cache told to it.
    """

    def __init__(
        self,
        parts: CacheParts,
        heads: PreTrainedModel,
        like: Callable[[], Sequence[torch.Tensor]],
        settle: Callable[[], object],
        row: int = 0,
    ) -> None:
        self._parts, self._heads, self._like, self._settle, self._row = parts, heads, like, settle, row
        self._columns: tuple[ColumnForm, ...] = ()
        self.reason: str | None = None
        self.root: bytes | None = None
        self._text_root = self._mark = b""
        self._borders: list[Border] = []
        self._text_keys: list[bytes] = []  # of the text's own chunks, up to the same borders

    def find(self, ids: Tokens, limit: int) -> list[torch.Tensor] | None:
        """What is stored of a text: tensors [1, heads, columns, dim] of its first columns, `limit` at most; None for
        none.
        """
        if not self._begin(ids):
            return None
        assert self.root is not None
        store = self._parts.binding.store
        empty = Ledger.empty(np.zeros(1, dtype=np.int64), self.root)
        (row,) = empty.plan(ids[None], 0, limit, store, 0, stateful=False).rows
        chunks = [segment.chunk for segment in row.segments if isinstance(segment.chunk, StoredChunk)]
        fetched = store.fetch(chunks)
        pieces: list[Sequence[torch.Tensor]] = []
        for segment in row.segments:
            if (chunk := fetched.get(segment.chunk.key)) is None or segment.start != sum(
                p[0].shape[1] for p in pieces
            ):
                break
            columns = slice(segment.offset, segment.offset + segment.stop - segment.start)
            pieces.append([each[:, columns] for each in LayerKVReader(chunk.kv).layer(len(chunk.kv.places) - 1) or ()])
        self._borders, self._text_keys = [Border(0, self.root)], [self._text_root]
        if not pieces:
            return None
        found = [torch.cat(own, dim=1)[None] for own in zip(*pieces, strict=True)]
        for border in row.borders:
            if border.at <= found[0].shape[2]:
                self._text_keys.append(prefix_key(self._text_keys[-1], ids[self._borders[-1].at : border.at]))
                self._borders.append(border)
        store.record_use(list(fetched.values()), missed=False)
        store.promote(list(fetched.values()))
        return found

    def offer(self, ids: Tokens, read: Read, first: int, *, tail: bool) -> None:
        """Offer chunks of a text that have become complete, with `tail` what fills no chunk, too.

        `read` gives the tensors [1, heads, columns, dim] of some columns, half-open, from `first` on.
        """
        store = self._parts.binding.store
        if self.reason is not None or not self._borders:
            return
        cut = store.chunker.next_cut(ids, self._borders[-1].at)
        if cut is None and (not tail or len(ids) - self._borders[-1].at < HEAD_TOKENS):
            return
        if (text := self._text(ids)) is None or text.root != self._text_root:
            self.reason = NOT_KEPT
            return
        if self._named(len(ids)) != self._mark:
            self.reason = self.reason or CHANGED
            return
        known = min(len(ids), text.log.length - int(text.log.pads[self._row]))
        with torch.inference_mode(False), torch.no_grad():
            for _ in range(2):
                if (at := self._borders[-1].at) < first:
                    self.reason = LEFT
                elif any(
                    (form.heads, form.dim, form.dtype) != (tensor.shape[1], tensor.shape[3], tensor.dtype)
                    for form, tensor in zip(self._columns, read(at, at + 1), strict=False)
                ):
                    self.reason = CHANGED
                elif self._put_all(ids[:known], read, tail=tail) is Put.NO_PARENT:  # an ancestor was evicted
                    del self._borders[1:], self._text_keys[1:]
                    continue
                return

    def _put_all(self, ids: Tokens, read: Read, *, tail: bool) -> Put:
        store, borders, last = self._parts.binding.store, self._borders, Put.PRESENT
        while (cut := store.chunker.next_cut(ids, borders[-1].at)) is not None:
            border, tokens = borders[-1], ids[borders[-1].at : cut]
            key, text_key = prefix_key(border.key, tokens), prefix_key(self._text_keys[-1], tokens)
            if not store.holds(text_key):
                self.reason = UNPAID
                return Put.UNSEEN
            last = Put.PRESENT if store.is_in_memory(key) else self._put(border, tokens, read, unfinished=False)
            if last is Put.NO_PARENT:
                return last
            borders.append(Border(cut, key))
            self._text_keys.append(text_key)
        if tail and len(ids) - borders[-1].at >= HEAD_TOKENS:
            last = self._put(borders[-1], ids[borders[-1].at :], read, unfinished=True)
        return last

    def _put(self, border: Border, tokens: Tokens, read: Read, *, unfinished: bool) -> Put:
        assert self.root is not None
        stop = border.at + len(tokens)
        sizes = [each.heads * each.dim * each.dtype.itemsize for each in self._columns]

        def copy_kv() -> LayerKV:
            return self._stored(read(border.at, stop))

        return self._parts.binding.store.put(
            self.root, border.key, border.at, tokens, sum(sizes) * len(tokens), copy_kv, unfinished=unfinished
        )

    def _stored(self, tensors: Sequence[torch.Tensor]) -> LayerKV:
        """Copies as the store keeps them: as a layer behind those of the model, for which no codec is used."""
        groups: dict[ColumnForm, list[torch.Tensor]] = {}
        places: list[Place] = []
        for form, tensor in zip(self._columns, tensors, strict=True):
            own = groups.setdefault(form, [])
            places.append((list(groups).index(form), len(own)))
            own.append(tensor[0])
        blocks: list[Block] = []
        for form, own in groups.items():
            stacked = torch.stack(own).detach()
            planes, ready = on_host(RAW.encode(stacked, "values", ()))
            shape, none = (form.heads, stacked.shape[2], form.dim), (None,) * len(own)
            blocks.append(Block(planes, shape, form.dtype, "values", RAW, none, stacked.device, ready=ready))
        return LayerKV(tuple(blocks), (*self._no_layers, tuple(places)))

    def _begin(self, ids: Tokens) -> bool:
        """Find the root; tells whether there is one."""
        text, store = self._text(ids), self._parts.binding.store
        if text is None:
            self.reason = NOT_KEPT
            return False
        if (mark := self._named(len(ids))) is None:
            return False
        self._columns = tuple(ColumnForm.of(each[0]) for each in self._like())
        form = ModelForm((*self._no_layers, self._columns), (None,) * (len(self._no_layers) + 1))
        durable = not mark.startswith(_PASSING)
        self._text_root, self._mark = text.root, mark
        self.root = store.beside(text.root, mark, form, durable=durable)
        self._parts.binding.head_roots.add(self.root)
        return True

    @property
    def _no_layers(self) -> tuple[None, ...]:
        model = self._parts.binding.model()
        return (None,) * len(cache_layers(model)) if model is not None else ()

    def _text(self, ids: Tokens) -> Ledger | None:
        """The ledger of the cache, if it holds this text and no more, and only what a plain forward computes."""
        self._settle()
        ledger = self._parts.writer.storable()
        if ledger is None or ledger.blended is not None or ledger.in_pieces is not None:
            return None
        if self._parts.binding.store.ranks is not None:  # each would find something else
            return None
        if self._row >= ledger.log.batch_size:
            return None
        held = ledger.log.row(self._row)
        return ledger if len(held) <= len(ids) + 1 and np.array_equal(held[: len(ids)], ids[: len(held)]) else None

    def _named(self, length: int) -> bytes | None:
        """What the K/V of the heads, as they are now, depends on; None, with the reason, if that cannot be told."""
        fingerprint = ModelState.of(self._heads).fingerprint
        seen = fingerprint.look(self._heads)
        if fingerprint.watched or fingerprint.unnamed(seen) is not None:
            self.reason = HOOKED
        elif any(part.training for part in self._heads.modules()):
            self.reason = TRAINED
        elif rope_regime(self._heads, length) != b"":
            self.reason = ANGLES
        else:
            if self._parts.binding.store.is_shared:
                found = fingerprint.durable(self._heads, found=seen)
                if isinstance(found, bytes):
                    return found
            return _PASSING + _Own.of(self._heads).name + fingerprint.current(self._heads, found=seen)
        return None


_PASSING = b"in this process: "


class _Own(KeptOnModel):
    """The name of heads that have none in other processes."""

    def __init__(self) -> None:
        self.name = os.urandom(16)
