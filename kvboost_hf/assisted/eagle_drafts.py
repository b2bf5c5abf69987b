"""Drafts by EAGLE-3 heads: loads them, and has them draft chains for `generate(assistant_model=...)`, and trees."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvboost_hf.assisted.eagle import EagleHeads, KeysValues, layer_numbers
from kvboost_hf.assisted.head_drafts import Chains
from kvboost_hf.assisted.heads import DraftedAnswer, HeadKind, Heads, prepared, require_can_read, share_of
from kvboost_hf.assisted.hidden import TextStates, asking_for
from kvboost_hf.assisted.kept_kv import KeptKV
from kvboost_hf.assisted.limits import vocab_size
from kvboost_hf.assisted.rounds import Drafter
from kvboost_hf.assisted.tree import depths, lineage
from kvboost_hf.compat import CACHE, HiddenForm

_OF_TARGET = {"embed_tokens.weight", "lm_head.weight"}  # which a target lends where the files have none
_MAPS = {"d2t", "t2d"}
_RENAMED = {r"^model\.": "", r"^layers\.0\.": "midlayer."}


def load_eagle(name: str, config: Any, target: PreTrainedModel, kwargs: dict[str, Any]) -> EagleHeads:
    """Load EAGLE-3 heads from a folder or the hub, with what they borrow of their target.

    Args:
        name: The folder or name.
        config: The configuration in that folder.
        target: The model that they draft for.
        kwargs: For `from_pretrained()`.

    Raises:
        ValueError: The folder has other weights than those of one such layer, or they do not fit the target.
    """
    if config.num_hidden_layers != 1:
        raise ValueError(
            f"EAGLE-3 heads must have 1 layer, got `num_hidden_layers={config.num_hidden_layers}` in {str(name)!r}. "
            "Choose heads of one layer."
        )
    kind: Any = EagleHeads
    lender: Any = target
    given: dict[str, Any] = {**kwargs, "config": config, "key_mapping": _RENAMED, "output_loading_info": True}
    try:
        with _without_report():
            heads, found = kind.from_pretrained(name, **given)
    except RuntimeError as error:
        if "size" not in str(error):
            raise
        raise ValueError(
            f"The weights in {str(name)!r} have other sizes than its configuration says. Choose heads in the format "
            f"of EAGLE-3 for Llama. {error}"
        ) from error
    missing, others = set(found["missing_keys"]), set(found["unexpected_keys"])
    draft_vocab = len(heads.d2t)
    if "d2t" in missing and draft_vocab != config.vocab_size:
        raise ValueError(
            f"EAGLE-3 heads with {draft_vocab} of {config.vocab_size} tokens must say which these are (`d2t`), and "
            f"{str(name)!r} does not."
        )
    if others or missing - _OF_TARGET - _MAPS:
        raise ValueError(
            f"{str(name)!r} must have the weights of one EAGLE-3 layer; others: {sorted(others) or 'none'}, missing: "
            f"{sorted(missing - _OF_TARGET - _MAPS) or 'none'}. Choose heads in the format of Llama."
        )
    if "d2t" in missing:
        heads.d2t = torch.zeros_like(heads.d2t)
    if "embed_tokens.weight" in missing:
        heads.embed_tokens = _borrowed(lender.get_input_embeddings(), heads, "embeddings", config.hidden_size)
    if "lm_head.weight" in missing:
        heads.lm_head = _borrowed(lender.get_output_embeddings(), heads, "output layer", config.hidden_size)
    loaded: EagleHeads = heads.eval()
    return loaded


@contextmanager
def _without_report() -> Iterator[None]:
    """Keep transformers from reporting weights as missing that a target lends; others are refused with an error."""

    def other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def _borrowed(module: Any, heads: EagleHeads, what: str, width: int) -> nn.Module:
    found: int = module.weight.shape[1]
    if found != width:
        raise ValueError(
            f"The heads have no {what} of their own, and {width} numbers for each token; those of the target have "
            f"{found}. Choose heads that were trained for this target."
        )
    borrowed: nn.Module = module
    return borrowed


def prepare_eagle(heads: EagleHeads, target: PreTrainedModel, chains: Chains) -> EagleHeads:
    """Prepare EAGLE-3 heads for a target; returns them.

    Args:
        heads: Which `load_eagle` has loaded, or that were trained.
        target: The model that they draft for.
        chains: How long chains are.

    Raises:
        ValueError: they were made for a target of another width, depth or vocabulary.
    """
    form, config = require_can_read(heads, target), target.config.get_text_config(decoder=True)
    name, kind = f"The heads, {type(heads).__name__},", type(target).__name__
    layers, width = layer_numbers(heads.config, form), config.hidden_size
    if heads.fc.in_features != len(layers) * width:
        raise ValueError(
            f"{name} read hidden states of {heads.fc.in_features // len(layers)} numbers, and those of their target, "
            f"a {kind}, have {width}. Choose heads that were trained for this target."
        )
    if not 0 <= min(layers) <= max(layers) < form.count:
        raise ValueError(
            f"{name} read the hidden states {list(layers)}, and their target, a {kind}, has those from 0 to "
            f"{form.count - 1}. Choose heads that were trained for this target."
        )
    known, needed = vocab_size(target), int(heads.targets.max()) + 1
    if heads.config.vocab_size != known or needed > known:
        raise ValueError(
            f"{name} draft for a vocabulary of {max(heads.config.vocab_size, needed)} tokens, and that of their "
            f"target, a {kind}, has {known}. Choose heads that were trained for this target."
        )
    prepared(heads, target, Eagle(heads, chains))
    return heads


class Eagle(HeadKind):
    """EAGLE-3 heads.

    Args:
        heads: Prepared for their target.
        chains: How long chains are.
    """

    reads_whole = True

    def __init__(self, heads: EagleHeads, chains: Chains) -> None:
        self._heads, self._chains = heads, chains

    def numbers(self, form: HiddenForm) -> Sequence[int]:
        return layer_numbers(self._heads.config, form)

    def drafting(self, target: Any, form: HiddenForm, answer: DraftedAnswer) -> Drafter:
        order = _in_order(form.numbered, self.numbers(form))
        return answer.trees(EagleSource(self._heads, answer.states, order, share=share_of(self._heads, target)))

    def generator(self, target: Any, make: Callable[[], Any], config: Any, processors: Any) -> Any:
        form = require_can_read(self._heads, target)
        states = TextStates(form.numbered(self.numbers(form)))
        order = _in_order(form.numbered, self.numbers(form))
        source = EagleSource(self._heads, states, order, asking_for(target, states.layers))
        return self._chains.candidates(source, config, processors)


def _in_order(numbered: Any, numbers: Sequence[int]) -> list[int]:
    """The keys of the states of these layers, in the order in which heads read them."""
    return [key for number in numbers for key in numbered(number)]


def _like(heads: EagleHeads) -> KeysValues:
    """Keys and values of no column."""
    layer = heads.midlayer.self_attn
    none = layer.k_proj.weight.new_empty(1, layer.k_proj.out_features // layer.head_dim, 0, layer.head_dim)
    return KeysValues(none, none)


class EagleSource:
    """Continues a text by EAGLE-3 heads, with their K/V of it.

    Args:
        heads: The heads.
        states: Hidden states of the text but for its last token.
        order: The layers in `states`, in the order in which the heads read them.
        asked: The value of `output_hidden_states` by which the target shows them.
        share: The time of a pass of the heads, over that of a pass of the target, as expected.
    """

    branches = True

    def __init__(
        self, heads: EagleHeads, states: TextStates, order: Sequence[int], asked: Any = None, *, share: float = 0.0
    ) -> None:
        self._heads, self._states, self._order, self.share = heads, states, order, share
        self.asks = {"output_hidden_states": asked}
        self._kept = KeptKV(heads, 1, lambda: _like(heads), Heads.of(heads).stats)
        self._kv: KeysValues | None = None  # of the text
        self._length = 0  # tokens of the text
        self._tree: KeysValues | None = None  # of the tokens behind it
        self._parents: list[int] = []
        self._hidden: list[torch.Tensor] = []  # [1, 1, hidden_size] behind the text, and behind each of the tokens

    def show(self, output: Any, length: int, pads: int, rejected: int) -> None:
        """As `ShownSource.show`."""
        states, first = self._states, pads if not self._states.stop else 0
        states.cache = getattr(output, CACHE, None)
        count = length - 1 - states.stop
        states.append({layer: output.hidden_states[layer][:, first : first + count] for layer in states.layers})

    def behind(self, length: int) -> int:
        """As `DraftSource.behind`."""
        return self._states.behind(length)

    def room(self, length: int, most: int) -> int:
        """`most`, where the hidden states of the text are known; else none."""
        return most if self._states.stop == length - 1 else 0

    @torch.no_grad()
    def begin(self, ids: torch.Tensor) -> torch.Tensor | None:
        """As `DraftSource.begin`; None where hidden states of the text are missing."""
        heads, stop = self._heads, ids.shape[1] - 1
        if self._states.stop != stop or not (new := self._states.take()):
            return None
        known = 0  # of the new ones
        if self._kv is None and (found := self._kept.begin(self._states.cache, ids, self._states.row)) is not None:
            self._kv = KeysValues(*found)
            known = self._kv.keys.shape[2]
        hidden = heads.fused([new[layer][:, known:] for layer in self._order])
        count, device = hidden.shape[1], hidden.device
        at = torch.arange(stop - count, stop, device=device)
        seen = None
        if self._kv is not None and count > 1:
            seen = torch.arange(stop, device=device) <= at[:, None]
        found, kv = heads(ids[:, -count:].to(device), hidden=hidden, position_ids=at[None], past=self._kv, seen=seen)
        self._kv, self._length = kv.behind(self._kv), stop + 1
        self._tree, self._parents, self._hidden = None, [], [found[:, -1:]]
        self._kept.offer(ids, self._read)
        logits: torch.Tensor = heads.logits(found[0, -1:])
        return logits

    @torch.no_grad()
    def forward(self, tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """As `DraftSource.forward`."""
        heads, past = self._heads, self._kv
        assert past is not None
        hidden = torch.cat([self._hidden[parent + 1] for parent in parents], dim=1)
        device, held = hidden.device, past.keys.shape[2]
        self._parents += parents
        depth = torch.from_numpy(depths(self._parents)[-len(tokens) :]).to(device)
        own = torch.from_numpy(lineage(self._parents)[-len(tokens) :]).to(device)
        seen = torch.cat([own.new_ones(len(tokens), held), own], dim=1)
        if self._tree is not None:
            past = self._tree.behind(past)
        ids = torch.tensor([tokens], device=device)
        found, kv = heads(ids, hidden=hidden, position_ids=(depth + held)[None], past=past, seen=seen)
        self._tree = kv.behind(self._tree)
        self._hidden += found.split(1, dim=1)
        logits: torch.Tensor = heads.logits(found[0])
        return logits

    def _read(self, start: int, stop: int) -> KeysValues:
        assert self._kv is not None
        return KeysValues(*(each[:, :, start:stop] for each in self._kv))

    def keep(self, path: Sequence[int]) -> None:
        """Nothing: the K/V of accepted tokens is computed again, from hidden states of the target."""
