"""Drafts by the assistants that come with Gemma 4, which read keys and values of their target and have none.

An assistant drafts behind the last token of a text, from that token's embedding, the hidden state of the token before
it, and the keys and values that two layers of the target hold, one with a window and one without:

    embedding of the last token, hidden state before it ─▶ attention to the target's K/V ─▶ logits, next hidden state

Each further token is computed at the same position, from the token and the hidden state before it. So alternatives to
a token cost no more than a longer chain, and nothing of a prompt is computed: a warm one is warm for both models.

transformers runs them as `assistant_model` as they are. Prepared here, they draft trees, too, and as many tokens as a
schedule says, sample their drafts where the target samples, and do not see K/V of tokens that were rejected.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.assisted.branches import Pair
from kvboost_hf.assisted.head_drafts import Chains
from kvboost_hf.assisted.heads import DraftedAnswer, HeadKind, prepared, require_can_read, share_of
from kvboost_hf.assisted.hidden import TextStates
from kvboost_hf.assisted.limits import vocab_size
from kvboost_hf.assisted.rounds import Drafter
from kvboost_hf.compat import LAST, SHARED_KV, HiddenForm, layer_configs

_WINDOWED = "sliding_attention"


def prepare_shared(draft: PreTrainedModel, target: PreTrainedModel, chains: Chains) -> PreTrainedModel:
    """Prepare an assistant of Gemma 4 for a target; returns it.

    Args:
        draft: The assistant.
        target: The model that it drafts for.
        chains: How long chains are.

    Raises:
        ValueError: it was made for a target of another width, vocabulary, window, or K/V.
    """
    config: Any = target.config.get_text_config(decoder=True)
    made: Any = draft.config
    own: Any = made.get_text_config(decoder=True)
    name, kind = f"The assistant, a {type(draft).__name__},", type(target).__name__
    if getattr(config, "kv_sharing_modes", None) is None:
        raise ValueError(
            f"{name} reads keys and values that a Gemma 4 shows, and a {kind} shows none. Pass its target, or another "
            "draft."
        )
    require_can_read(draft, target)
    other = "Choose the assistant of this target."
    if made.backbone_hidden_size != config.hidden_size:
        raise ValueError(
            f"{name} reads hidden states of {made.backbone_hidden_size} numbers, and those of its target, a {kind}, "
            f"have {config.hidden_size}. {other}"
        )
    if vocab_size(draft) != (known := vocab_size(target)):
        raise ValueError(
            f"{name} drafts for a vocabulary of {vocab_size(draft)} tokens, and that of its target, a {kind}, has "
            f"{known}. {other}"
        )
    sources, needed = _sources(config), set(own.layer_types)
    if not needed <= sources.keys():
        raise ValueError(
            f"{name} reads layers of the types {', '.join(sorted(needed))}, and its target, a {kind}, has "
            f"{', '.join(sorted(sources))}. {other}"
        )
    if _WINDOWED in needed and own.sliding_window != config.sliding_window:
        raise ValueError(
            f"{name} has windows of {own.sliding_window} tokens, and its target, a {kind}, of "
            f"{config.sliding_window}. {other}"
        )
    theirs, mine = layer_configs(target.config), layer_configs(made)
    for layer, each in enumerate(own.layer_types):
        reads, shows = _kv_of(mine[layer]), _kv_of(theirs[sources[each]])
        if reads != shows:
            raise ValueError(
                f"{name} reads {reads[0]} heads of {reads[1]} numbers of a layer of the type {each}, and its target, "
                f"a {kind}, has {shows[0]} of {shows[1]}. {other}"
            )
    return prepared(draft, target, _SharedKV(draft, chains))


def _sources(config: Any) -> dict[str, int]:
    """By type, the layer of a target whose K/V an assistant reads: the last one with K/V of its own."""
    own = config.num_hidden_layers - config.num_kv_shared_layers
    return {each: layer for layer, each in enumerate(config.layer_types[:own])}


def _kv_of(layer: Any) -> tuple[int, int]:
    return int(layer.num_key_value_heads), int(layer.head_dim)


class _SharedKV(HeadKind):
    """Assistants of Gemma 4.

    Args:
        draft: Prepared for its target.
        chains: How long chains are.
    """

    reads_whole = False

    def __init__(self, draft: PreTrainedModel, chains: Chains) -> None:
        self._draft, self._chains = draft, chains

    def numbers(self, form: HiddenForm) -> int:
        return LAST

    def drafting(self, target: Any, form: HiddenForm, answer: DraftedAnswer) -> Drafter:
        return answer.trees(SharedKVSource(self._draft, target, answer.states))

    def generator(self, target: Any, make: Callable[[], Any], config: Any, processors: Any) -> Any:
        source = SharedKVSource(self._draft, target, TextStates((LAST,), whole=False))
        return self._chains.candidates(source, config, processors)


class SharedKVSource:
    """Continues a text by an assistant that reads the K/V of its target.

    Args:
        draft: The assistant.
        target: The model that it drafts for.
        states: Takes the hidden state of the text's last token but one, and reads K/V of the tokens up to that.
    """

    branches = True

    def __init__(self, draft: PreTrainedModel, target: PreTrainedModel, states: TextStates) -> None:
        config: Any = target.config.get_text_config(decoder=True)
        self.asks: dict[str, Any] = {"output_hidden_states": LAST, SHARED_KV: True}
        self._draft: Any = draft
        self._embed: Any = target.get_input_embeddings()
        self._states, self._sources, self.share = states, _sources(config), share_of(draft, target)
        self._window = int(config.sliding_window)
        self._shown: Mapping[str, Pair] | None = None
        self._kv: dict[str, Pair] = {}
        self._mask: torch.Tensor | None = None  # [1, columns]
        self._length = 0  # tokens of the text
        self._hidden: list[torch.Tensor] = []  # [1, 1, hidden_size] behind the text, and behind each token since

    def show(self, output: Any, length: int, pads: int, rejected: int) -> None:
        """As `ShownSource.show`."""
        states, columns = output.hidden_states[LAST], pads + length - 1
        kept = states.shape[1] - rejected
        self._states.append({LAST: states[:, kept - 1 : kept]}, length - 1)
        self._shown = {}
        for each in self._sources:
            keys, values = output.shared_kv_states[each]
            stop = keys.shape[2] - rejected if each == _WINDOWED else columns
            self._shown[each] = keys[:, :, :stop], values[:, :, :stop]

    def behind(self, length: int) -> int:
        """As `DraftSource.behind`: nothing is computed of a text."""
        return 0

    def room(self, length: int, most: int) -> int:
        """`most`, where the hidden state of the token before the last one is known; else none."""
        return most if self._states.stop == length - 1 else 0

    @torch.no_grad()
    def begin(self, ids: torch.Tensor) -> torch.Tensor | None:
        """As `DraftSource.begin`; None where the hidden state is missing."""
        length = ids.shape[1]
        if self._states.stop != length - 1 or not (new := self._states.take()):
            return None
        held = self._shown if self._shown is not None else self._read()
        self._shown = None
        columns = max(keys.shape[2] for keys, _ in held.values())
        window = self._window - 1  # as a token of the target sees besides itself
        self._kv = {
            each: (keys[:, :, -window:], values[:, :, -window:]) if each == _WINDOWED else (keys, values)
            for each, (keys, values) in held.items()
        }
        self._mask, pads = None, columns - (length - 1)
        if pads:
            self._mask = torch.arange(columns, device=self._draft.device)[None] >= pads
        self._length, self._hidden = length, []
        return self._run(ids[:, -1:], new[LAST][:, -1:])

    @torch.no_grad()
    def forward(self, tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """As `DraftSource.forward`."""
        ids = torch.tensor(tokens, device=self._hidden[0].device)[:, None]
        return self._run(ids, torch.cat([self._hidden[parent + 1] for parent in parents]))

    def keep(self, path: Sequence[int]) -> None:
        """Nothing: the assistant keeps nothing of a text."""

    def _run(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab_size] behind `ids` [rows, 1], by hidden states [rows, 1, hidden_size] before them."""
        rows = len(ids)
        embeds = self._embed(ids.to(self._embed.weight.device)).to(hidden)
        found = self._draft(
            inputs_embeds=torch.cat([embeds, hidden], dim=-1),
            attention_mask=self._mask.expand(rows, -1) if self._mask is not None else None,
            position_ids=torch.full((rows, 1), self._length - 1, device=self._draft.device),
            shared_kv_states={
                each: (keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1))
                for each, (keys, values) in self._kv.items()
            },
        )
        self._hidden += found.last_hidden_state.split(1)
        logits: torch.Tensor = found.logits[:, -1].float()
        return logits

    def _read(self) -> dict[str, Pair]:
        """The K/V that whoever runs rounds holds of the text."""
        assert self._states.read_kv is not None
        pairs = self._states.read_kv(tuple(self._sources.values()))
        return {each: pair for each, pair in zip(self._sources, pairs, strict=True) if pair is not None}
