"""Prepares a draft model for its target."""

import logging
import time
import warnings
from collections.abc import Callable
from os import PathLike
from typing import Any, Literal

from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from kvboost_hf.assisted.draft import Drafting
from kvboost_hf.assisted.eagle import EagleHeads, is_eagle
from kvboost_hf.assisted.eagle_drafts import load_eagle, prepare_eagle
from kvboost_hf.assisted.head_drafts import Chains
from kvboost_hf.assisted.heads import Heads, is_dflash, load_own_heads, prepare_blocks
from kvboost_hf.assisted.limits import fitted
from kvboost_hf.assisted.lookup import LOOKED_UP, TextStore, lookup_assistant
from kvboost_hf.assisted.rounds import SpeculationStats
from kvboost_hf.assisted.schedule import Adaptive, Constant, DraftLength, Heuristic, most_tokens
from kvboost_hf.assisted.shared_kv import prepare_shared
from kvboost_hf.assisted.tree_decoding import TreeDecoding
from kvboost_hf.compat import (
    cache_argument,
    for_config,
    forward_arguments,
    loader_of,
    loader_of_pair,
    naming,
    reads_shared_kv,
    require_generates,
    require_one_process,
    unwrapped,
)

_log = logging.getLogger("kvboost_hf")
Schedule = Literal["adaptive", "constant", "heuristic"]

_LONGEST = 32  # tokens of a draft with the adaptive schedule, at most
_FAR = 256  # and with other schedules
_FIRST = 5  # tokens, before anything is known


def load_assistant(
    name_or_model: str | PreTrainedModel,
    *,
    target: PreTrainedModel | None = None,
    schedule: Schedule | DraftLength = "adaptive",
    num_assistant_tokens: int | None = None,
    confidence_threshold: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    store: TextStore | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Prepare a draft model for `target.generate(assistant_model=...)`.

    Without a `target` the model is the target, and what drafts best for it without another model is chosen: the
    multi-token-prediction layers of its checkpoint, or else a `lookup_assistant`. The log says which.

    A DFlash drafter is prepared as other drafts are, and its calls need no `speculation_type`. Such heads, and
    multi-token-prediction layers, draft as many tokens as they have been trained for, whatever the schedule. EAGLE-3
    heads are loaded from the files of the field, and draft chains by the schedule; in `TreeDecoding` they draft trees.
    So do the assistants of Gemma 4, which read K/V of their target.

    The draft's `generate` is replaced by one that decides in each round how many tokens to draft, and counts how many
    the target accepts. If the vocabularies differ in padding only, that is done to a copy with embeddings of its own.

    An answer with a logits processor that may keep a state, such as one of your own, or with stopping criteria of your
    own has no drafts; nor does text beyond the positions that the draft has learned. The log says so. Drafts end
    before a token that would complete a stop string.

    The first token of an answer comes from the target alone, as without a draft: the draft takes in the prompt after
    it. A target with weights that are fetched for each pass, such as one with streamed layers, checks a draft in its
    first pass already, because passes are what takes its time.

    Args:
        name_or_model: A name on the hub, a folder, or a loaded model; without a `target`, the loaded model to draft
            for.
        target: The model to draft for; None for `name_or_model`.
        schedule: `"adaptive"`: the number of tokens follows from the acceptance and the times measured so far, and is
            larger where a pass of the target takes long, as with streamed layers. `"constant"`, `"heuristic"` as in
            transformers, or an object of your own.
        num_assistant_tokens: Tokens per draft: always with `"constant"`, else in the first round; 5 by default.
            transformers ignores an argument of this name to `generate()`.
        confidence_threshold: Drafts end at a token with less probability than that.
        clock: Seconds.
        store: Where a `lookup_assistant` finds text besides the prompt; None for the prompt alone.
        kwargs: For `from_pretrained()`, with a name.

    Returns:
        The draft, whose own `generate()` works as before; a copy of it if it had to be resized.

    Raises:
        ValueError: another vocabulary than the target's, heads of another width or depth, another kind of model, a
            name without a target or of no model, or an invalid number.
        TypeError: arguments for `from_pretrained()` without a name.

    Warns:
        UserWarning: it is on another device than the target, computes in a wider type, or has more weights than one
            that is not quantized.

    Example:
        >>> from kvboost_hf import load_assistant, speculation_stats
        >>> from kvboost_hf.assets import load_embedded, load_embedded_draft
        >>> model, tokenizer = load_embedded()
        >>> draft = load_assistant(load_embedded_draft(), target=model)
        >>> inputs = tokenizer("Maria lives in Rome. Where does Maria live?", return_tensors="pt")
        >>> out = model.generate(**inputs, assistant_model=draft, max_new_tokens=12)
        >>> speculation_stats(draft).rounds > 0
        True
    """
    if num_assistant_tokens is not None and (type(num_assistant_tokens) is not int or num_assistant_tokens < 1):
        raise ValueError(f"`num_assistant_tokens` must be 1 or more, or None, got {num_assistant_tokens!r}.")
    if not isinstance(confidence_threshold, int | float) or not 0 <= confidence_threshold < 1:
        raise ValueError(f"`confidence_threshold` must be from 0 to less than 1, got {confidence_threshold!r}.")
    lengths = _schedule(schedule, num_assistant_tokens or _FIRST)
    if kwargs and (target is None or isinstance(name_or_model, PreTrainedModel)):
        raise TypeError(
            f"load_assistant() takes {', '.join(map(repr, kwargs))} only with the name of a draft, to load it. Leave "
            "that out, or see whether it is misspelled."
        )
    if target is None:
        return _found_for(name_or_model, store, num_assistant_tokens)
    require_generates(target)
    draft = _load(name_or_model, target, kwargs)
    if is_dflash(draft.config):
        return prepare_blocks(draft, target)
    if isinstance(draft, EagleHeads):
        return prepare_eagle(draft, target, Chains(lengths, confidence_threshold))
    if reads_shared_kv(draft.config):
        return prepare_shared(draft, target, Chains(lengths, confidence_threshold))
    require_one_process(target, "Drafts whose length is chosen")
    _require_kind(draft, target)
    other = ", or pass `tokenizer` and `assistant_tokenizer` to generate() with the draft as it is"
    draft = fitted(draft, target, or_else=other)
    _warn_of_costs(draft, target)
    config = draft.generation_config
    most = _LONGEST if schedule == "adaptive" else _FAR  # the schedule decides how many
    drafting = Drafting(draft, target, lengths, clock)
    config.num_assistant_tokens = most_tokens(most, target, drafting.pauses)
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = confidence_threshold
    draft.generate = drafting  # type: ignore[assignment]
    return draft


def speculation_stats(assistant: PreTrainedModel | TreeDecoding) -> SpeculationStats:
    """Counts of the drafts of a model that `load_assistant` has prepared, of heads, or of a `TreeDecoding`.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(assistant, TreeDecoding):
        return assistant.stats
    if (heads := Heads.known(assistant)) is not None:
        return heads.stats
    drafting = getattr(assistant, "__dict__", {}).get("generate")
    if not isinstance(drafting, Drafting):
        raise ValueError(
            f"`assistant` must be a model that load_assistant() has prepared, or a TreeDecoding, got "
            f"{type(assistant).__name__}. For text that is looked up, pass "
            "`custom_generate=TreeDecoding(lookup_assistant(model, store))` to generate(), and that here."
        )
    return drafting.stats


def _load(name_or_model: Any, target: PreTrainedModel, kwargs: dict[str, Any]) -> PreTrainedModel:
    if isinstance(name_or_model, PreTrainedModel):
        return name_or_model
    if not isinstance(name_or_model, str | PathLike):
        raise ValueError(f"A draft must be a model, or the name of one, got {name_or_model!r}.")
    given = {"dtype": target.dtype, "device_map": {"": target.device}, **kwargs}
    config = kwargs.get("config")
    if not isinstance(config, PreTrainedConfig):
        with naming(name_or_model):
            config = AutoConfig.from_pretrained(name_or_model if config is None else config, **for_config(kwargs))
    if is_eagle(config):
        return load_eagle(str(name_or_model), config, target, given)
    if is_dflash(config):
        loader: Any = AutoModel
    else:
        loader = loader_of_pair(config) if target.config.is_encoder_decoder else loader_of(config)
    with naming(name_or_model, (OSError,)):  # a ValueError may be about the arguments
        draft: PreTrainedModel = loader.from_pretrained(name_or_model, **given)
    return draft


def _found_for(target: Any, store: TextStore | None, tokens: int | None) -> PreTrainedModel:
    """What drafts best for a target without another model."""
    if not isinstance(target, nn.Module):
        raise ValueError(
            f"Without `target`, load_assistant() takes the model to draft for, got {target!r}. Pass "
            "load_assistant(draft, target=model) for a draft of another model."
        )
    target = unwrapped(target)
    require_generates(target)
    heads = load_own_heads(target)
    if isinstance(heads, PreTrainedModel):
        _log.info("Drafts of a %s: %d multi-token-prediction layers.", type(target).__name__, heads.num_mtp_layers)
        return heads
    _log.info("Drafts of a %s: text that repeats, since %s.", type(target).__name__, heads)
    return lookup_assistant(target, store, num_assistant_tokens=tokens or LOOKED_UP)


def _schedule(schedule: Schedule | DraftLength, tokens: int) -> DraftLength:
    if schedule == "adaptive":
        return Adaptive(tokens, _LONGEST)
    if schedule == "constant":
        return Constant(tokens)
    if schedule == "heuristic":
        return Heuristic(tokens)
    if not isinstance(schedule, DraftLength):
        raise ValueError(
            f"`schedule` must be 'adaptive', 'constant', 'heuristic' or an object with `length` and `learn`, got "
            f"{schedule!r}. For drafts of so many tokens pass schedule='constant' and `num_assistant_tokens`."
        )
    return schedule


def _require_kind(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    if draft is target:
        raise ValueError(
            "The draft must be another model than its target. For a draft by the first layers of the target itself, "
            "call generate(assistant_early_exit=...)."
        )
    require_generates(draft)
    if not cache_argument(draft):
        raise ValueError(
            f"The draft must keep K/V between its tokens, got {type(draft).__name__}, whose forward takes no cache. "
            "Choose another one."
        )
    if draft.config.is_encoder_decoder and not target.config.is_encoder_decoder:
        raise ValueError(
            f"The draft must be a decoder of text, as its target is, got {type(draft).__name__}, an encoder-decoder. "
            "Load one with AutoModelForCausalLM."
        )
    alone = not draft.config.is_encoder_decoder and "encoder_outputs" not in forward_arguments(draft)
    if target.config.is_encoder_decoder and alone:
        raise ValueError(
            f"The draft must be an encoder-decoder, as its target is, or a decoder whose forward takes "
            f"`encoder_outputs`, got {type(draft).__name__}. Load one with AutoModelForSeq2SeqLM or "
            "AutoModelForSpeechSeq2Seq."
        )


def _warn_of_costs(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    if draft.device != target.device:
        warnings.warn(
            f"The draft is on {draft.device} and its target on {target.device}: tokens and scores are copied in each "
            "round. Move it with draft.to(target.device).",
            stacklevel=3,
        )
    if draft.dtype.itemsize > target.dtype.itemsize:
        warnings.warn(
            f"The draft computes in {draft.dtype} and its target in {target.dtype}: it takes more time and memory "
            f"than it has to. Load it with dtype={target.dtype}.",
            stacklevel=3,
        )
    quantized = getattr(target.config, "quantization_config", None) is not None  # in buffers, which are not counted
    if not quantized and draft.num_parameters() >= target.num_parameters():
        warnings.warn(
            f"The draft has {draft.num_parameters()} weights, and its target {target.num_parameters()}: drafting will "
            "take longer than it saves. Choose a smaller one.",
            stacklevel=3,
        )
