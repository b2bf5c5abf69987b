"""Handing K/V from the live cache to the store."""

from collections.abc import Iterable, Sequence

from kvboost_hf import forks
from kvboost_hf.cache.kv.layer_kv import LayerStates
from kvboost_hf.cache.live.binding import Binding
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.live.live_kv import LiveKV
from kvboost_hf.cache.planning.plan import HEAD_TOKENS
from kvboost_hf.cache.store.chunk_store import ChunkStore, Put
from kvboost_hf.errors import StoreClosedError

_UNPAID = (
    "storing has taken longer than what was reused of it has saved, so that text is now stored when it comes the "
    "second time (ReusePolicy(min_prefill_saving=0) stores all of it)"
)


class StoreWriter:
    """Offers the K/V of a cache to its store: what is there to stay, and only what the model as it is now computes.

    Args:
        binding: The model and the store.
        live: The K/V.

    Attributes:
        settling: Held while a forward is settled, so that whoever comes second waits until it is.
    """

    def __init__(self, binding: Binding, live: LiveKV) -> None:
        self._binding, self._live, self.settling = binding, live, forks.rlock()

    def offer_new(self, ledger: Ledger) -> None:
        """Offer chunks that have become complete."""
        policy = self._binding.policy
        everything = not policy.min_prefill_saving or policy.mode == "blend"  # found behind other texts, too
        if ledger.store_new(self._live.layers, self._binding.store, unseen=everything):
            self._live.tally.unstored = _UNPAID

    def confirm(self, ledger: Ledger, *, root_checked: bool = False) -> None:
        """Everything in the layers is there to stay: offer chunks that have become complete.

        Args:
            ledger: That of the layers, in step.
            root_checked: The root of the model was read just before the forward.
        """
        ledger.unconfirmed = False
        if not ledger.has_new_chunk(self._binding.store.chunker.chunk_size):
            return
        if self._may_store(ledger, root_checked=root_checked):
            self.offer_new(ledger)
            self._live.release(ledger.first_unstored())
        else:  # there is no storing them later
            self._live.release(ledger.log.length)
            if not ledger.log.trusted:  # nor anything that follows: no need to ask again at each step
                self._live.ledger = None

    def confirm_steps(self) -> None:
        """Take over what compiled steps have appended, and offer it."""
        live = self._live
        if live.static is not None:
            live.catch_up()
            stepped, live.stepped = live.stepped, False
            if stepped and (ledger := live.in_step(look=False)) is not None:
                self.confirm(ledger)

    def offer_all(self, *, pinned: bool = False) -> list[Put]:
        """Offer everything that the cache holds, unfinished chunks included."""
        ledger, layers, store = self.storable(), self._live.layers, self._binding.store
        if ledger is None:
            return []
        results: list[Put] = []
        for row in range(ledger.log.batch_size):
            results += ledger.store_row(row, layers, store, pinned=pinned, again=True)
            results.append(ledger.store_tail(row, layers, store, pinned=pinned))
            if self._live.stateful:
                results.append(ledger.store_states(row, layers, store, pinned=pinned))
        return results

    def offer_earlier_states(
        self, ledger: Ledger, saved: Iterable[tuple[int, bool, Sequence[LayerStates]]], *, root_checked: bool = False
    ) -> None:
        """Offer states that a forward over a prompt has left on its way; see `Ledger.store_earlier_states`."""
        if self._may_store(ledger, root_checked=root_checked):
            ledger.store_earlier_states(saved, self._live.layers, self._binding.store)

    def offer_again(self, ledger: Ledger) -> None:
        """Offer all complete chunks: what was computed takes the place of what was wrong."""
        if self._may_store(ledger):
            for row in range(ledger.log.batch_size):
                ledger.store_row(row, self._live.layers, self._binding.store, again=True)

    def offer_content(self, store: ChunkStore, start: int, *, pinned: bool = False) -> list[Put]:
        """Offer columns from `start` on, of one row without padding, to be found by content only.

        They are cut as if they were all there is, so that they are cut in the same way behind any other text.
        """
        ledger = self.storable()
        return ledger.store_content(start, self._live.layers, store, pinned=pinned) if ledger is not None else []

    def offer_tails(self) -> None:
        """Offer the tokens that fill no chunk, before the cache lets go of them."""
        self.confirm_steps()
        ledger = self._live.in_step()
        if ledger is not None and not self._live.in_forward and self._may_store(ledger):
            self.offer_tails_from(ledger, 0)

    def offer_tails_from(self, ledger: Ledger, keep: int) -> None:
        """Offer the tails of the rows that are about to lose columns from `keep` on."""
        with_states = self._live.stateful and not ledger.unconfirmed
        offer = ledger.store_states if with_states else ledger.store_tail  # states bring their tail with them
        for row, pad in enumerate(ledger.log.pads):
            if ledger.log.length - max(keep, int(pad)) >= HEAD_TOKENS:
                offer(row, self._live.layers, self._binding.store)

    def storable(self) -> Ledger | None:
        """The ledger, compiled steps included, if all that it records may be stored now."""
        self.confirm_steps()
        ledger = self._live.in_step()
        return ledger if ledger is not None and self._may_store(ledger) else None

    def _may_store(self, ledger: Ledger, *, root_checked: bool = False) -> bool:
        """Whether the layers hold what the ledger says, computed by the model as it is now."""
        live, binding = self._live, self._binding
        if not live.untouched(ledger):
            live.note_change()
            return False
        if not ledger.log.trusted or binding.model() is None or binding.altered is not None:
            return False
        # What others have put into it may have changed in the course of the forward.
        if root_checked and not binding.may_change_within_a_forward:
            return True
        try:
            return binding.root(live.regime) == ledger.root and binding.altered is None
        except StoreClosedError:  # which another thread may do at any time
            return False
