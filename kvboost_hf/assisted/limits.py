"""Limits drafts: the rounds without any, the ends of texts, positions and vocabularies.

transformers calls each logits processor with drafted tokens that it then rejects, and asks stopping criteria once a
round. What keeps a state, or has to see each token, gives the answer of plain decoding only without drafts.
Vocabularies may differ in padding rows of the embeddings, as within a family of models.
"""

import copy
import logging
from collections.abc import Iterable, Sequence
from itertools import chain, count
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from kvboost_hf.compat import AssistedCall, assisted_call, decoder_layers, remember

_log = logging.getLogger(__name__)

# Processors of transformers that keep something of the texts that they are called with.
_WITH_STATE = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
    logits_process.WhisperNoSpeechDetection,
    logits_process.DiaEOSChannelFilterLogitsProcessor,
    logits_process.DiaEOSDelayPatternLogitsProcessor,
)
# Criteria that depend on the text alone, or end it at a token that transformers cuts a round at, or at no certain one.
_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_decoder_position_embeddings")
_SPARE = 4  # rows, at most, that a table of positions has besides those of the configuration
_PADDING = 1024  # rows of embeddings, at most: tables are padded to multiples of up to that


def may_keep_state(processor: Any) -> bool:
    """Whether a logits processor may keep something of the texts that it was called with: any of a user's own may."""
    return type(processor).__module__ != logits_process.__name__ or isinstance(processor, _WITH_STATE)


class Pauses:
    """Decides before each round of assisted decoding whether to draft at all, and says why not: once in the log.

    Args:
        positions: The most tokens that the draft model takes; None for any number.
    """

    def __init__(self, positions: int | None) -> None:
        self.positions, self._said = positions, set[str]()

    def __call__(self) -> bool:
        """Whether the round that begins has no draft."""
        reason = self._reason(assisted_call())
        if reason is not None and reason not in self._said:
            self._said.add(reason)
            _log.warning("No drafts: %s.", reason)
        return reason is not None

    def room(self, length: int, most: int) -> int:
        """How many tokens can be drafted behind so many, at most `most`."""
        return most if self.positions is None else min(most, self.positions - length + 1)

    def _reason(self, call: AssistedCall | None) -> str | None:
        if call is None:
            return None
        for each in call.processors:
            if may_keep_state(each):
                return (
                    f"{type(each).__name__} may keep a state, and assisted decoding would call it with tokens that it "
                    "then rejects. generate(custom_generate=TreeDecoding(draft)) calls it once for each token"
                )
        for each in call.criteria:
            if type(each) not in _CRITERIA and not getattr(each, "once_a_round", False):
                return (
                    f"{type(each).__name__} may end the text at any token, and assisted decoding would ask it once a "
                    "round. generate(custom_generate=TreeDecoding(draft)) asks it at each token"
                )
        if call.ids is not None and self.room(call.ids.shape[1], 1) < 1:
            return f"the draft model has {self.positions} positions, and the text is longer"
        return None


def before_end(ids: torch.Tensor, draft: Sequence[int]) -> int:
    """How many tokens of a draft behind `ids` [1, tokens] stand before the first that would complete a stop string.

    A target that accepts a whole draft adds a token of its own, and transformers asks only then whether the text ends.
    """
    strings = _stop_strings()
    for at in range(1, len(draft) + 1) if strings else ():
        text = torch.cat([ids, ids.new_tensor([draft[:at]])], 1)
        if any(bool(each(text, None).any()) for each in strings):
            return at - 1
    return len(draft)


def harmless_token(ids: torch.Tensor, ends: Iterable[int]) -> int:
    """A token to draft behind `ids` [1, tokens] that completes no stop string: one of `ends`, or any other."""
    strings = _stop_strings()
    for token in chain(ends, count()):
        text = torch.cat([ids, ids.new_tensor([[token]])], 1)
        if not any(bool(each(text, None).any()) for each in strings):
            return token
    raise AssertionError


def _stop_strings() -> list[Any]:
    call = assisted_call()
    return [each for each in call.criteria if type(each) is StopStringCriteria] if call is not None else []


def learned_positions(model: PreTrainedModel) -> int | None:
    """How many tokens a decoder takes at most, since it has a table of positions; None if it has no such table."""
    found: int | None = remember(model, learned_positions, lambda: _learned_positions(model))
    return found


def _learned_positions(model: Any) -> int | None:
    config = model.config.get_text_config(decoder=True)
    if isinstance(longest := getattr(config, "max_seq_len", None), int):  # of biases in place of positions
        return longest
    known = [length for name in _LENGTHS if isinstance(length := getattr(config, name, None), int)]
    owner = model.get_decoder() if model.config.is_encoder_decoder else model
    words = {id(table) for table in (model.get_input_embeddings(), model.get_output_embeddings())}
    tables = [
        module.weight for module in owner.modules() if isinstance(module, nn.Embedding) and id(module) not in words
    ]
    rows = {len(table) for table in (*tables, *owner.buffers()) if table.ndim == 2}
    return next((length for length in known for more in range(_SPARE + 1) if length + more in rows), None)


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the table of embeddings, as the configuration says."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def end_tokens(eos_token_id: Any) -> list[int]:
    """The tokens that end a text, by whatever `generate()` takes for them: a number, several, a tensor, or None."""
    found: list[int] = torch.as_tensor([] if eos_token_id is None else eos_token_id).flatten().tolist()
    return found


@torch.no_grad()
def fitted(
    draft: PreTrainedModel, target: PreTrainedModel, *, name: str = "its target", or_else: str = ""
) -> PreTrainedModel:
    """A draft with the vocabulary size of its target: itself, or a copy where the two differ by padding.

    A copy has embeddings and a head of its own, and shares all other weights. New rows are copies of that of the last
    token, which is padding or rare. Tokens that the target has no row for are never drafted.

    Args:
        draft: The draft.
        target: The model that checks its tokens.
        name: What the error calls the target.
        or_else: What else its reader may do, beside choosing another draft.

    Raises:
        ValueError: the sizes differ by more than padding.
    """
    mine, theirs = vocab_size(draft), vocab_size(target)
    if mine == theirs:
        return draft
    if abs(mine - theirs) > _PADDING or 10 * abs(mine - theirs) > min(mine, theirs):
        raise ValueError(
            f"The draft must have the vocabulary of {name}, of {theirs} tokens, got {mine}. Choose one of the same "
            f"family{or_else}."
        )
    resized = _copy_beside_tables(draft)
    resized.resize_token_embeddings(theirs, mean_resizing=False)
    if theirs > mine:
        for table in _tables(resized):
            for name in ("weight", "bias"):
                rows = getattr(table, name, None)
                if rows is not None and len(rows) == theirs:
                    rows[mine:] = rows[mine - 1]
    return resized


def _tables(model: Any) -> list[Any]:
    return [table for table in (model.get_input_embeddings(), model.get_output_embeddings()) if table is not None]


def _copy_beside_tables(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares all weights except those of the embeddings and the head, which resizing writes to."""
    own = {id(weight) for table in _tables(model) for weight in table.parameters()}
    # Layers are shared as they are: hooks on them, as those that fetch weights, cannot be copied.
    memo: dict[int, Any] = {id(layer): layer for layer in decoder_layers(model)}
    memo |= {id(each): each for each in (*model.parameters(), *model.buffers()) if id(each) not in own}
    return copy.deepcopy(model, memo)
