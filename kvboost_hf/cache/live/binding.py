"""`Binding`: the model, store and settings of a cache; and `StoreWriter`, which hands that store its K/V."""

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvboost_hf import forks
from kvboost_hf.cache.identity import ModelFingerprint, ModelState
from kvboost_hf.cache.identity.foreign import foreign_attention
from kvboost_hf.cache.identity.values import arithmetic
from kvboost_hf.cache.identity.walk import ModelParts
from kvboost_hf.cache.kv.layer_states import LayerStates
from kvboost_hf.cache.layers.quantized import mark
from kvboost_hf.cache.live import LiveKV
from kvboost_hf.cache.live.ledger import Ledger, Offering
from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, PIECE
from kvboost_hf.cache.prompt import ALL_LOGITS
from kvboost_hf.cache.store.chunk_store import ChunkStore, Put, default_store, salt_bytes
from kvboost_hf.compat import (
    LAST,
    OwnHooks,
    hidden_form,
    known_hidden_states_reason,
    precision_readers,
    probe_reason,
    require_cache,
)
from kvboost_hf.config import KVQuantConfig, ReusePolicy
from kvboost_hf.errors import StoreClosedError

T = TypeVar("T")
_DEFAULT = ReusePolicy()


class Binding:
    """The model, store and settings of one cache, and the root key of what is computed with them.

    Attributes:
        hidden_layers: The layers whose hidden states are kept beside K/V, of the text that the cache holds.
        head_roots: The roots that K/V of heads was looked for under, for texts of the cache.
        model: Gives the model, which is held weakly, or None if it no longer exists.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: ChunkStore,
        policy: ReusePolicy,
        salt: bytes,
        live_quant: KVQuantConfig | None,
    ) -> None:
        self.store, self.policy, self.salt, self.live_quant = store, policy, salt, live_quant
        self.model = weakref.ref(model)
        self._fingerprint = weakref.ref(ModelState.of(model).fingerprint)  # it may hold hooks that hold the model
        self.hidden_layers: tuple[int, ...] = ()
        self.head_roots: set[bytes] = set()
        if policy.keep_logprobs and known_hidden_states_reason(model) is None:
            self.hidden_layers = (LAST,)
        self._mark = mark(live_quant) if live_quant is not None else b""
        self._hooks = 0, 0  # that anybody, and that others, had registered when the root was last read
        self._precision: list[Any] = []  # of autocast, then
        self._facts: dict[Hashable, Any] = {}  # of the model, when it was last looked at

    @classmethod
    def checked(
        cls,
        model: PreTrainedModel,
        store: ChunkStore | None,
        policy: ReusePolicy | None,
        salt: str | bytes | None,
        live_quant: KVQuantConfig | None,
        max_cache_len: int | None,
    ) -> "Binding":
        """The binding of a new cache; see `ChunkReuseCache` for the defaults, and for what is refused.

        ValueError: arguments that do not fit each other. StoreClosedError: the store was closed.
        """
        require_cache(model)
        if store is not None:
            require_store(store, model)
        if policy is not None:
            require_policy(policy)
        if live_quant is not None and max_cache_len is not None:
            raise ValueError(
                f"`max_cache_len` must be None with `live_quant`, whose buffers grow, got {max_cache_len}. Leave out "
                "one of the two."
            )
        policy = policy if policy is not None else _DEFAULT
        other = "live_quant" if live_quant is not None else "max_cache_len" if max_cache_len is not None else None
        for name in ("keep_logprobs", "keep_hidden_states", "reproducible"):
            if (value := getattr(policy, name)) and other is not None:
                raise ValueError(f"`{name}` must be False with `{other}`, got {value!r}. Leave out one of the two.")
        store = store if store is not None else default_store(model)
        _require_fit(store, policy, live_quant)
        return cls(model, store, policy, store.salt if salt is None else salt_bytes(salt), live_quant)

    def change(self, store: ChunkStore | None = None, policy: ReusePolicy | None = None) -> None:
        """Go on with another store, or another policy. ValueError: it does not fit the rest."""
        store, policy = store if store is not None else self.store, policy if policy is not None else self.policy
        _require_fit(store, policy, self.live_quant)
        self.store, self.policy = store, policy

    @property
    def fingerprint(self) -> ModelFingerprint | None:
        """The fingerprint of the model, or None if it no longer exists."""
        return self._fingerprint()

    def always_hidden(self, model: PreTrainedModel) -> tuple[int, ...]:
        """The layers whose hidden states are kept of all texts."""
        asked, layers = self.policy.keep_hidden_states, list[int]()
        if self.policy.keep_logprobs and known_hidden_states_reason(model) is None:
            layers = [LAST]
        if asked and not isinstance(form := hidden_form(model), str):
            layers += form.numbered(asked)
        return in_order(layers)

    def hidden_layers_of(self, asked: Any) -> tuple[int, ...] | str:
        """The layers that a value of `output_hidden_states` asks for; or why those of reused tokens cannot be had."""
        model = self.model()
        if self.policy.keep_hidden_states is False or model is None:
            return "`keep_hidden_states` is False"
        if self.live_quant is not None:
            return "`live_quant` keeps none"
        if isinstance(form := hidden_form(model), str):
            return form
        if not form.lists and not isinstance(asked, int):
            return "this release of transformers numbers the layers of a list otherwise"
        return form.layers(asked)

    @property
    def all_logits_reason(self) -> str | None:
        """Why the logits of reused tokens cannot be had, or None."""
        model = self.model()
        if not self.policy.keep_logprobs or model is None:
            return ALL_LOGITS
        return known_hidden_states_reason(model)

    @property
    def altered(self) -> str | None:
        """The hook of somebody else that changes what the model computes, as a reason; None if there is none."""
        fingerprint = self.fingerprint
        return fingerprint.altered if fingerprint is not None and fingerprint.watched else None

    @property
    def reason_in_training(self) -> str | None:
        """Why K/V of the model, a part of which is in training mode, may be drawn at random; None if it is not."""
        model, fingerprint = self.model(), self.fingerprint
        return fingerprint.reason_in_training(model) if model is not None and fingerprint is not None else None

    def look(self) -> ModelParts | None:
        """What the K/V of the model, as it is now, depends on; None if it no longer exists."""
        with OwnHooks.lock:
            self._hooks = RemovableHandle.next_id, RemovableHandle.next_id - OwnHooks.registered
        model, fingerprint = self.model(), self._fingerprint()
        if model is None or fingerprint is None:
            return None
        seen = fingerprint.look(model)
        self._precision, self._facts = [read() for read in precision_readers()], seen.facts
        return seen

    def fact(self, model: PreTrainedModel, find: Callable[[Any], T]) -> T:
        """What `find` says of all but the weights of the model, as it was at the last look; asked once for each."""
        if find not in self._facts:
            self._facts[find] = find(model)
        found: T = self._facts[find]
        return found

    def probe_reason(self, model: PreTrainedModel) -> str | None:
        """Why a run on a few tokens rules out reuse for the model as it was at the last look, or None."""
        fingerprint = self._fingerprint()
        age = fingerprint.age if fingerprint is not None else None
        if self._facts.get(probe_reason) != (age,):
            if (reason := probe_reason(model)) is not None:
                return reason
            self._facts[probe_reason] = (age,)
        return None

    def root(
        self, regime: bytes, seen: ModelParts | None = None, hidden_layers: tuple[int, ...] | None = None
    ) -> bytes | None:
        """The key that all chains of the model, as it is now, start from; None for a store that keeps nothing.

        `regime` names the rotary frequencies that are in force (`compat.rope_regime`); `seen` is what `look` has just
        found, or None to look; `hidden_layers` are those whose hidden states are kept beside K/V, None for those of
        the text under way. StoreClosedError: the store was closed, or the model no longer exists.
        """
        seen = self.look() if seen is None else seen
        read_all = self.policy.weights_check == "full"
        if self.policy.reproducible:
            regime += f"pieces of {PIECE}, {arithmetic()}".encode()
        kept = self.hidden_layers if hidden_layers is None else hidden_layers
        how: dict[str, Any] = {"read_all": read_all, "hidden_layers": kept, "seen": seen}
        return self.store.root(self.salt, regime + self._mark, **how)

    @property
    def has_new_hooks(self) -> bool:
        """Whether somebody has registered or removed a hook anywhere since the root was last read."""
        every, others = self._hooks
        if RemovableHandle.next_id == every:
            return False
        with OwnHooks.lock:
            return bool(RemovableHandle.next_id - OwnHooks.registered != others)

    @property
    def looks_changed(self) -> bool:
        """Whether hooks or autocast are others than when the root was last read. Cheap enough for each token."""
        return self.has_new_hooks or self._precision != [read() for read in precision_readers()]

    @property
    def may_change_within_a_forward(self) -> bool:
        """Whether functions or hooks of others run in the model, which may change its K/V in the course of it."""
        model, fingerprint = self.model(), self.fingerprint
        if model is None or fingerprint is None or fingerprint.watched:
            return True
        return self.fact(model, foreign_attention) is not None


def require_store(store: object, model: PreTrainedModel) -> None:
    """Refuse anything but a `ChunkStore`, and one of another model, by a ValueError.

    StoreClosedError: it was closed.
    """
    if not isinstance(store, ChunkStore):
        raise ValueError(f"`store` must be a ChunkStore, got {store!r}. Pass ChunkStore(model).")
    store.require_open()
    if not store.serves(model):
        raise ValueError(
            "`store` was made for another model object, whose K/V this model cannot use. Pass a store made with "
            "ChunkStore(model), or None for the model's default store."
        )


def require_policy(policy: object) -> None:
    """Refuse anything but a `ReusePolicy` by a ValueError."""
    if not isinstance(policy, ReusePolicy):
        raise ValueError(f"`policy` must be a ReusePolicy, got {policy!r}. Pass ReusePolicy(mode='blend').")


def _require_fit(store: ChunkStore, policy: ReusePolicy, live_quant: KVQuantConfig | None) -> None:
    if store.ranks is not None and (policy.mode != "exact" or policy.audit_rate):
        name, given = ("mode", policy.mode) if policy.mode != "exact" else ("audit_rate", policy.audit_rate)
        raise ValueError(
            f"`{name}` must be {'exact' if name == 'mode' else 0!r} with a model that {store.ranks.size} ranks "
            f"compute (tp_plan), got {given!r}: each rank would choose for itself what to compute again."
        )
    if policy.reproducible and store.lossy is not None:
        raise ValueError(
            f"`reproducible` must be False with a store with codec {store.lossy!r}, got True: what comes out "
            "of that codec is not what was computed. Make a store without a codec."
        )
    if policy.audit_rate and (live_quant is not None or store.lossy is not None):
        lossy = "`live_quant`" if live_quant is not None else f"a store with codec {store.lossy!r}"
        raise ValueError(
            f"`audit_rate` must be 0 with {lossy}, whose answers may differ, got {policy.audit_rate}. Measure "
            "them with verify_correctness()."
        )


_UNPAID = (
    "storing has taken longer than what was reused of it has saved, so that text is now stored when it comes the "
    "second time (ReusePolicy(min_prefill_saving=0) stores all of it)"
)


def in_order(layers: Iterable[int]) -> tuple[int, ...]:
    """Layers whose hidden states are kept, each once: by their numbers, and `LAST` behind them."""
    return tuple(sorted(set(layers), key=lambda layer: (layer == LAST, layer)))


class StoreWriter:
    """Offers the K/V of a cache to its store: what is there to stay, and only what the model as it is now computes.

    Attributes:
        settling: Held while a forward is settled, so that whoever comes second waits until it is.
    """

    def __init__(self, binding: Binding, live: LiveKV) -> None:
        self._binding, self._live, self.settling = binding, live, forks.rlock()

    def offer_new(self, ledger: Ledger) -> None:
        """Offer chunks that have become complete."""
        policy = self._binding.policy
        everything = not policy.min_prefill_saving or policy.mode == "blend"  # found behind other texts, too
        offering = Offering(ledger, self._live.layers, self._binding.store)
        if Put.UNSEEN in [put for row in ledger.rows for put in offering.chunks(row, unseen=everything)]:
            self._live.tally.unstored = _UNPAID

    def confirm(self, ledger: Ledger, *, root_checked: bool = False) -> None:
        """Everything in the layers is there to stay: offer chunks that have become complete.

        `root_checked` says that the root of the model was read just before the forward.
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
        if (ledger := self.storable()) is None:
            return []
        results, offering = list[Put](), Offering(ledger, self._live.layers, self._binding.store, pinned)
        for row in ledger.rows:
            results += [*offering.chunks(row, again=True), offering.tail(row)]
            if self._live.stateful:
                results.append(offering.states(row))
        return results

    def offer_earlier_states(
        self, ledger: Ledger, saved: Iterable[tuple[int, bool, Sequence[LayerStates]]], *, root_checked: bool = False
    ) -> None:
        """Offer states that a forward over a prompt has left on its way; see `Offering.earlier_states`."""
        if self._may_store(ledger, root_checked=root_checked):
            Offering(ledger, self._live.layers, self._binding.store).earlier_states(saved)

    def offer_again(self, ledger: Ledger) -> None:
        """Offer all complete chunks: what was computed takes the place of what was wrong."""
        if self._may_store(ledger):
            offering = Offering(ledger, self._live.layers, self._binding.store)
            for row in ledger.rows:
                offering.chunks(row, again=True)

    def offer_content(self, store: ChunkStore, start: int, *, pinned: bool = False) -> list[Put]:
        """Offer columns from `start` on, of one row without padding, to be found by content only.

        They are cut as if they were all there is, so that they are cut in the same way behind any other text.
        """
        ledger = self.storable()
        return Offering(ledger, self._live.layers, store, pinned).content(start) if ledger is not None else []

    def offer_tails(self) -> None:
        """Offer the tokens that fill no chunk, before the cache lets go of them."""
        self.confirm_steps()
        ledger = self._live.in_step()
        if ledger is not None and not self._live.in_forward and self._may_store(ledger):
            self.offer_tails_from(ledger, 0)

    def offer_tails_from(self, ledger: Ledger, keep: int) -> None:
        """Offer the tails of the rows that are about to lose columns from `keep` on."""
        with_states = self._live.stateful and not ledger.unconfirmed
        offering = Offering(ledger, self._live.layers, self._binding.store)
        offer = offering.states if with_states else offering.tail  # states bring their tail with them
        for row, pad in enumerate(ledger.log.pads):
            if ledger.log.length - max(keep, int(pad)) >= HEAD_TOKENS:
                offer(row)

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
