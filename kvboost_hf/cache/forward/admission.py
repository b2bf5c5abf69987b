"""When reuse is off: every reason for which a forward runs without stored K/V, in the order in which they are asked.

    reason_for_stock_layers     this text runs on transformers' own layers
    admit_prompt                this prompt runs as it stands, on empty layers
    admit_more, admit_piece     what follows runs as it stands, and nothing more is known of what the layers hold
    reason_against_moving       chunks are reused where they stood, and not elsewhere; `plan_moved` has two more
    reason_against_short_hits   a few known tokens are computed again

`root_of` tells the key that chains of a prompt start from, if it may be stored at all.

The first reason that holds is in the report. Reasons that a model or its arguments have of their own come from
`known_reason`, `probe_reason`, `padding_reason`, `read_inputs`, `read_prompt` and `blend_reason`.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.cache.costs import PIECE, Costs
from kvboost_hf.cache.forward.fill import fill_turned
from kvboost_hf.cache.forward.running import CacheParts, Request
from kvboost_hf.cache.forward.scatter import Narrowing, ScatterPass, attention_of_the_end
from kvboost_hf.cache.identity.foreign import holder_of_cache, is_own
from kvboost_hf.cache.kv.model_form import copy_columns
from kvboost_hf.cache.layers import make_layers
from kvboost_hf.cache.live import CHANGED
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.moved import REPAIRS, BlendPlan, Measure, Repair, RepairRow
from kvboost_hf.cache.planning.plan import ReusePlan, RowPlan, Segment
from kvboost_hf.cache.prompt import (
    OF_MEDIA,
    ForwardInputs,
    Kwargs,
    positions_count_up,
    positions_follow_padding,
    read_pads,
)
from kvboost_hf.cache.prompt.media import ENCODED, MEDIA_ARGUMENTS, has_types_of_media, payload, read_prompt
from kvboost_hf.cache.prompt.token_log import Prompt, counts_from_padding_id
from kvboost_hf.cache.store.chunk_store import StoredChunk
from kvboost_hf.compat import (
    KeyRotation,
    PrivateCache,
    Ranks,
    attempt,
    attn_implementation,
    decoder_layers,
    difference,
    embedding_table,
    encoded_from,
    has_unmasked_windows,
    head_widths,
    input_device,
    key_rotation,
    masks_reason,
    original_length,
    own_hook,
    padding_reason,
    probe_reason,
    recall,
    remember,
    require_known_ids,
    rope_regime,
    run_model,
    tolerance,
)
from kvboost_hf.handles import ATTENTION

_is_own = cache(is_own)  # asked for each text
UPDATE_REPLACED = "`update` of this ChunkReuseCache was replaced"
RECORDED = "PyTorch records or transforms the forward (torch.jit, torch.export, make_fx, torch.func, a CUDA graph)"
MASK = "the attention mask hides more than padding on the left"
PADDING_WITHOUT_POSITIONS = "there is padding but no position_ids, so that positions do not follow it"
POSITIONS = "position_ids do not count up from 0"
NO_POSITIONS = "without position_ids, which generate() passes, it does not count from 0"
ROWS_TOGETHER = "its cache has layers whose rows cannot be told apart; pass one row"
LENGTH = "its rotary frequencies depend on the length, and this is longer than what they were trained for"
UNMASKED = "transformers applies its sliding window to cached tokens only, and this is longer than the window"
NO_STORE = "its store was closed"
UNKNOWN = "nothing is known of what the cache holds"
MODEL_CHANGED = "the model was changed after the beginning of the prompt"
TYPES_LATER = "types of images came after the beginning of the prompt"
MEDIA_LATER = "images, sound or video came after the beginning of the prompt"
PADDED_WITHOUT = "the attention mask or position_ids of a padded batch are missing"
MASK_LENGTH = "the attention mask is not as long as what the cache holds and the ids that follow it"
CHANGED_ON_THE_WAY = "position_ids or the attention mask changed on the way"
ALL_LOGITS_OF_MEDIA = "the logits of all tokens of images, sound or video are wanted"
OTHER_RANK = "another of the ranks that compute the model cannot reuse it"
STATES_OF_RANKS = "its cache has states, and several ranks compute the model (tp_plan)"
HIDDEN_OF_MEDIA = "the hidden states of images, sound or video are wanted"
MOVED_HIDDEN = "the call asks for hidden states, which moved chunks have had behind another text"
REUSE_COSTS_MORE = (
    "on this CPU it takes less time to compute its few known tokens again than to reuse them "
    "(ReusePolicy(min_prefill_saving=0) reuses them all the same)"
)
SEVERAL_ROWS = "with `reproducible`, only one row without padding is reused"
NARROW_WINDOW = (
    "with `reproducible`, layers with a window are reused only if a head's key takes a multiple of 64 bytes"
)
MEDIA_WHOLE = "with `reproducible`, prompts with images, sound or video are not reused"
OTHER_PIECES = "with `reproducible`, a prompt in pieces is reused only if these end at multiples of 256 tokens"
MOVED_MEDIA = "it has images, sound or video"
MOVED_FIXED_SIZE = "the cache has a fixed size (max_cache_len)"
MOVED_QUANTIZED = "the cache holds codes (live_quant)"
MOVED_NOTHING = "no stored chunk has the same tokens as a part of it"
MOVED_SAVES_LITTLE = "moving would save fewer tokens than `min_prefill_saving`"
RIDING_UNWANTED = "`progressive` is False, or None where much text has moved behind few edits"
RIDING_WINDOW = "layers with a sliding window have let go of tokens"
RIDING_SHARED = "in a batch of the server, layers that share K/V take no repair along"
RIDING_ON_CPU = "on a CPU each further token of a forward takes its time"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A prompt, or more of one, that may use stored K/V and leave some."""

    inputs: ForwardInputs
    prompt: Prompt
    pads: NDArray[np.int64]  # columns of left padding of each row
    root: bytes
    regime: bytes


def reason_for_stock_layers(parts: CacheParts, request: Request) -> str | None:
    """Why a text that begins runs on transformers' own layers, or None. Looks at the model."""
    live, model = parts.live, request.model
    given: Any = request.cache
    if live.unsupported is not None:
        return live.unsupported
    if given.recorded:
        return RECORDED
    request.seen = parts.binding.look()
    if live.static is None and (reason := parts.binding.fact(model, holder_of_cache)) is not None:
        return reason
    if "update" in given.__dict__ or not _is_own(type(given).update):
        return UPDATE_REPLACED
    return None


def admit_prompt(parts: CacheParts, request: Request) -> Admitted | str:
    """A prompt that starts at column 0; or why it runs as it stands."""
    live, model, kwargs, inputs = parts.live, request.model, request.kwargs, request.inputs
    if isinstance(inputs, str):
        return inputs
    if live.static is not None and (reason := parts.binding.fact(model, holder_of_cache)) is not None:
        return reason
    batch, columns = inputs.input_ids.shape
    pads = read_pads(inputs.attention_mask, batch, columns)
    if pads is None:
        return MASK
    if pads.any() and not positions_follow_padding(model, inputs):
        return PADDING_WITHOUT_POSITIONS
    if not positions_count_up(inputs.position_ids, pads, 0):
        return POSITIONS
    if inputs.position_ids is None and counts_from_padding_id(model):
        return NO_POSITIONS
    regime = rope_regime(model, columns - int(pads.min())) if length_matters(parts, model) else b""
    if regime is None:
        return UNMASKED if has_unmasked_windows(model) else LENGTH
    root = parts.binding.root(regime, request.seen)
    if root is None:
        return NO_STORE
    if (reason := parts.binding.reason_in_training) is not None:
        return reason
    if pads.any() and (reason := padding_reason(model)):
        return reason
    prompt = _read_prompt(model, inputs, kwargs, pads)
    if isinstance(prompt, str):
        return prompt
    if batch > 1 and any(layer.single_row for layer in live.layers):
        return ROWS_TOGETHER
    if (altered := parts.binding.altered) is not None:
        return altered
    if parts.binding.policy.reproducible and (reason := _reason_against_pieces(parts, request, prompt, pads, regime)):
        return reason
    return Admitted(_without_empty_mask(parts, inputs, pads), prompt, pads, root, regime)


def root_of(parts: CacheParts, tokens: int) -> bytes | None:
    """The root of a prompt of one row with so many tokens; None if nothing of it can be stored."""
    live, model = parts.live, parts.binding.model()
    if model is None or live.unsupported is not None:
        return None
    seen = parts.binding.look()
    regime = rope_regime(model, tokens) if length_matters(parts, model) else b""
    if regime is None:
        return None
    grows = live.static is None and parts.binding.live_quant is None  # others keep no hidden states
    return parts.binding.root(regime, seen, parts.binding.always_hidden(model) if grows else None)


def admit_more(parts: CacheParts, request: Request, ledger: Ledger | None, held: int) -> str | None:
    """Why ids that follow `held` columns run without being recorded, or None."""
    live, inputs, kwargs = parts.live, request.inputs, request.kwargs
    if isinstance(inputs, str):
        return inputs
    if ledger is None:
        return CHANGED if live.changed else UNKNOWN
    if not request.mask_fits:
        return MASK_LENGTH
    new = inputs.input_ids.shape[1]
    length = held + new - int(ledger.log.pads.min())
    if length_matters(parts, request.model) and rope_regime(request.model, length) != live.regime:
        return UNMASKED if has_unmasked_windows(request.model) else LENGTH
    loops = request.in_own_loop or request.in_generate  # nobody changes the model between two tokens without a trace
    if (not loops or parts.binding.looks_changed) and parts.binding.root(live.regime) != ledger.root:
        return MODEL_CHANGED
    if not loops and has_types_of_media(kwargs, new):
        return TYPES_LATER
    padded = bool(ledger.log.pads.any()) and live.counting is not None  # states have no more use for a mask
    if padded and (inputs.attention_mask is None or not positions_follow_padding(request.model, inputs)):
        return PADDED_WITHOUT
    return MEDIA_LATER if not MEDIA_ARGUMENTS.isdisjoint(kwargs) and payload(kwargs) else None


def length_matters(parts: CacheParts, model: PreTrainedModel) -> bool:
    """Whether what a model computes of a token depends on how long the text is."""
    return parts.binding.fact(model, original_length) is not None


def admit_piece(parts: CacheParts, request: Request, ledger: Ledger, held: int) -> Admitted | str:
    """More of a prompt, as with `prefill_chunk_size`; or why it runs as it stands."""
    live, inputs = parts.live, request.inputs
    assert isinstance(inputs, ForwardInputs)
    batch, new = inputs.input_ids.shape
    before, pads = ledger.log.pads, read_pads(inputs.attention_mask, batch, held + new)
    # Rows that were all padding so far may have more of it.
    if pads is None or not ((pads == before) | ((before == held) & (pads >= held))).all():
        return CHANGED_ON_THE_WAY
    if not (ledger.log.trusted and positions_count_up(inputs.position_ids, pads, held)):
        return CHANGED_ON_THE_WAY
    if parts.binding.root(live.regime) != ledger.root:
        return MODEL_CHANGED
    if ledger.in_pieces not in (None, held):
        return OTHER_PIECES
    if ledger.in_pieces is not None and inputs.computes_all:
        return inputs.computes_all
    inputs = _without_empty_mask(parts, inputs, pads)
    prompt = _read_prompt(request.model, inputs, request.kwargs, pads - held)
    if isinstance(prompt, str) or prompt.media.any():
        return CHANGED_ON_THE_WAY
    return Admitted(inputs, prompt, pads, ledger.root, live.regime)


A = TypeVar("A")


def agreed(ranks: Ranks, found: A | str, parts: CacheParts) -> A | str:
    """What was found, or why it is not used: a reason at one rank is a reason at all."""
    if parts.live.stateful:
        found = STATES_OF_RANKS
    return found if ranks.all(not isinstance(found, str)) or isinstance(found, str) else OTHER_RANK


def _reason_against_pieces(
    parts: CacheParts, request: Request, prompt: Prompt, pads: NDArray[np.int64], regime: bytes
) -> str | None:
    """Why a prompt cannot be computed in the same pieces each time, or None."""
    if len(pads) > 1 or pads.any():
        return SEVERAL_ROWS
    if prompt.media.any():
        return MEDIA_WHOLE
    # Windows begin at any column of their buffers, and products of what begins elsewhere in memory round otherwise.
    narrow = any(width * request.model.dtype.itemsize % 64 for width in head_widths(request.model.config))
    if narrow and any(layer.is_sliding for layer in parts.live.layers):
        return NARROW_WINDOW
    assert isinstance(request.inputs, ForwardInputs)
    return LENGTH if regime else request.inputs.computes_all


def reason_against_moving(parts: CacheParts, model: PreTrainedModel, *, media: bool) -> str | None:
    """Why nothing of a prompt can be served by moved chunks, or None."""
    if media:
        return MOVED_MEDIA
    if parts.live.static is not None:
        return MOVED_FIXED_SIZE
    if parts.binding.live_quant is not None:
        return MOVED_QUANTIZED
    if parts.live.regime:
        return LENGTH
    return blend_reason(model, repair_for(model, parts.binding.policy.repair, len(parts.live.layers)).measure)


def reason_against_short_hits(
    parts: CacheParts, model: PreTrainedModel, plan: ReusePlan, inputs: ForwardInputs, ledger: Ledger
) -> str | None:
    """Why to compute a whole prompt again, where that is quicker than what is left of it behind a short beginning.

    What somebody has pinned is always reused.
    """
    if not plan.filled or not parts.binding.policy.min_prefill_saving or not _runs_unmasked(parts, plan, inputs):
        return None
    columns = inputs.input_ids.shape[1]
    if columns - plan.filled < PIECE or any(layer.is_sliding for layer in parts.live.layers):  # a mask in any case
        return None
    costs = Costs.of(model)
    attention = parts.binding.fact(model, attn_implementation)
    if attention == "sdpa":
        behind = costs.behind(plan.filled, columns)
    elif attention == ATTENTION:
        behind = costs.merged(plan.filled, columns)
    else:
        return None
    if behind < costs.whole(columns):
        return None
    keys = [segment.chunk.key for row in plan.rows for segment in row.segments]
    borders = [border.key for row in ledger.borders for border in row]
    return None if parts.binding.store.has_pinned([*keys, *borders]) else REUSE_COSTS_MORE


def adds_mask(parts: CacheParts, model: PreTrainedModel, plan: ReusePlan, inputs: ForwardInputs) -> bool:
    """Whether attention needs a mask only because something is reused."""
    return _runs_unmasked(parts, plan, inputs) and parts.binding.fact(model, attn_implementation) == "sdpa"


def _runs_unmasked(parts: CacheParts, plan: ReusePlan, inputs: ForwardInputs) -> bool:
    """Whether a prompt without reuse is one causal square; on a CPU: elsewhere it is not measured."""
    if any(plan.pads) or parts.live.regime or parts.live.static is not None:
        return False  # padding needs a mask in any case
    return inputs.input_ids.device.type == "cpu"


def _without_empty_mask(parts: CacheParts, inputs: ForwardInputs, pads: NDArray[np.int64]) -> ForwardInputs:
    """Without a mask that says nothing: some models with states cannot take a part of it."""
    return replace(inputs, attention_mask=None) if parts.live.stateful and not pads.any() else inputs


def _read_prompt(
    model: PreTrainedModel, inputs: ForwardInputs, kwargs: Kwargs, pads: NDArray[np.int64]
) -> Prompt | str:
    ids: Tokens = inputs.input_ids.cpu().numpy().astype(np.int64, copy=False)
    positions = inputs.position_ids
    found = positions.cpu().numpy() if positions is not None and positions.ndim > 2 else None
    if found is None and OF_MEDIA.isdisjoint(kwargs):
        if not (ids.min() >= 0 and ids.max() < getattr(model.get_input_embeddings(), "num_embeddings", 0)):
            require_known_ids(model, ids, "Token ids")
        return Prompt.of_text(ids)
    encoded = kwargs.get(ENCODED)
    source = (encoded_from(encoded) if encoded is not None else None) or kwargs
    return read_prompt(model, ids, found, pads, kwargs, source)


_TOKENS = 40
_MOVED = slice(5, 27)
_SHIFT = 3
_FEW_LAYERS = 8  # of which the two that `"cacheblend"` computes whole are a quarter or more


def blend_reason(model: PreTrainedModel, measure: Measure) -> str | None:
    """Why moved chunks cannot be used, or not be repaired by what `measure` says; None if they can.

    Once per model: a few forwards of a few tokens.
    """
    key = (blend_reason, model.dtype, attn_implementation(model), measure)
    return remember(model, key, lambda: _reason(model, measure))


def repair_for(model: PreTrainedModel, name: str, num_layers: int) -> Repair:
    """The repair of that name; with `"auto"`, the one that is best for a model of so many layers."""
    if name != "auto":
        return REPAIRS[name]
    few = num_layers <= _FEW_LAYERS and blend_reason(model, Measure.DEVIATION) is None
    return REPAIRS["cacheblend" if few else "query"]


def needs_no_mask(model: PreTrainedModel) -> bool:
    """Whether the model's own forward of a whole prompt gives its layers no mask: SDPA's causal one will do."""
    return bool(recall(model, (needs_no_mask, model.dtype, attn_implementation(model))))


def _reason(model: PreTrainedModel, measure: Measure) -> str | None:
    if reason := probe_reason(model):
        return reason
    rotation = key_rotation(model)
    if isinstance(rotation, str):
        return rotation
    if reason := masks_reason(model):
        return reason
    if len(decoder_layers(model)) != len(make_layers(model)):
        return "its decoder layers cannot be told apart"
    if measure is Measure.DEVIATION and len(rotation.layers) < 2:
        return "it has no second layer to be measured"
    return attempt(model, lambda: _probe(model, rotation, measure), "it fails on a part of its tokens")


@torch.no_grad()
def _probe(model: PreTrainedModel, rotation: KeyRotation, measure: Measure) -> str | None:
    """Move K/V that was computed a few positions further on: the logits must be those of a plain forward."""
    vocab_size = len(embedding_table(model))
    device = input_device(model)
    ids = (torch.arange(_TOKENS, device=device)[None] * 7919 + 13) % vocab_size
    positions = torch.arange(_TOKENS, device=device)[None]
    layers = make_layers(model)
    masks: list[Any] = []
    watch = own_hook(decoder_layers(model)[0].register_forward_pre_hook, _Watch(masks).before, with_kwargs=True)
    try:
        plain = _last_logits(model, PrivateCache([layer.native for layer in make_layers(model)]), ids, positions)
    finally:
        watch.remove()
    remember(model, (needs_no_mask, model.dtype, attn_implementation(model)), lambda: masks == [None])
    _last_logits(model, PrivateCache([layer.native for layer in layers]), ids, positions + _SHIFT)
    kv = copy_columns(layers, 0, _MOVED.start, _MOVED.stop)
    own = ids[0, _MOVED].cpu().numpy()
    chunk = StoredChunk(b"", b"", b"", _MOVED.start + _SHIFT, own, kv, 0, len(own))
    moved = np.zeros(_TOKENS, dtype=bool)
    moved[_MOVED] = True
    row = RepairRow(~moved, moved, (_MOVED.start,))
    segment = Segment(chunk, 0, _MOVED.start, _MOVED.stop, moved=True)
    reuse = ReusePlan(0, _TOKENS, (RowPlan(_TOKENS, (segment,), (), None),), (0,))
    plan = BlendPlan(reuse, (row,))

    layers = make_layers(model)
    fill_turned(layers, reuse, rotation)
    if measure is Measure.ATTENTION:
        attention_of_the_end(model, layers, plan, ids, 0)
    chosen = np.flatnonzero(~moved)[None]
    narrowing: Narrowing | None = None
    if measure is Measure.DEVIATION:
        narrowing = Narrowing(1, 1, lambda scores, step: chosen, 1 - rotation.rotated(1))
    columns = np.arange(_TOKENS)[None] if narrowing is not None else chosen
    cache = PrivateCache([layer.native for layer in layers])
    scatter = ScatterPass(model, cache, layers, columns, (0,), narrowing=narrowing, unmasked=needs_no_mask(model))
    cache.take = scatter.update
    try:
        found = _last_logits(model, cache, **scatter.arguments(ids, 0))
    finally:
        scatter.close()
        cache.take = None
    if any(tokens > len(chosen[0]) for tokens in scatter.layer_tokens[2:]):
        return "its layers do not take a part of their tokens"
    off = difference(found, plain)
    if not off <= tolerance(model.dtype):
        return f"a part of its tokens over moved K/V gives other logits (by {off:.2g} standard deviations)"
    return None


class _Watch:
    """Notes the mask that a layer is given."""

    leaves_kv_alone = True  # read by the fingerprint: other hooks may change what a model computes

    def __init__(self, masks: list[Any]) -> None:
        self._masks = masks

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._masks.append(kwargs.get("attention_mask", ...))


def _last_logits(
    model: PreTrainedModel,
    cache: Cache,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    output = run_model(model, input_ids, cache, position_ids=position_ids, attention_mask=attention_mask)
    logits: torch.Tensor = output.logits[:, -1].float()
    return logits
