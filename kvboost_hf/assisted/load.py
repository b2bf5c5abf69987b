"""A draft model that fits its target."""

import time
import warnings
from collections.abc import Callable
from os import PathLike
from typing import Any, Literal

from transformers import AutoModelForCausalLM, PreTrainedModel

from kvboost_hf.assisted.draft import Drafting
from kvboost_hf.assisted.schedule import Adaptive, Constant, DraftLength, Heuristic
from kvboost_hf.assisted.stats import SpeculationStats
from kvboost_hf.assisted.tree_decoding import TreeDecoding
from kvboost_hf.assisted.vocabulary import fit_vocabulary, vocab_size

Schedule = Literal["adaptive", "constant", "heuristic"]

_LONGEST = 32  # draft of the adaptive schedule
_FAR = 256  # up to here other schedules decide
_FIRST = 5  # tokens, before anything is known


def load_assistant(
    name_or_model: str | PreTrainedModel,
    *,
    target: PreTrainedModel,
    schedule: Schedule | DraftLength = "adaptive",
    num_assistant_tokens: int | None = None,
    confidence_threshold: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    **kwargs: Any,
) -> PreTrainedModel:
    """Prepare a draft model for `target.generate(assistant_model=...)`.

    A draft whose vocabulary is that of its target but for padding is resized.

    transformers asks the draft for candidates in each round; what it returns decides how many tokens are drafted, and
    notes what came of them.

    Args:
        name_or_model: A name on the hub, a folder, or a loaded model.
        target: The model to draft for.
        schedule: `"adaptive"`: as many tokens as acceptance and times measured so far say, more where a pass of the
            target takes long, as with streamed layers. `"constant"`, `"heuristic"` as transformers has them, or one of
            your own.
        num_assistant_tokens: For `"constant"` always, for the others in the first round; 5 by default. What is passed
            to `generate()` under this name is not read by transformers.
        confidence_threshold: Drafts end at a token that the draft gives less probability than that.
        clock: Seconds.
        kwargs: For `from_pretrained()`, with a name.

    Returns:
        The draft. Its own `generate()` works as before.

    Raises:
        ValueError: its vocabulary is not the target's, it is no causal language model, or numbers that are none.

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
    if not 0 <= confidence_threshold < 1:
        raise ValueError(f"`confidence_threshold` must be from 0 to less than 1, got {confidence_threshold}.")
    if isinstance(name_or_model, PreTrainedModel):
        draft = name_or_model
    elif not isinstance(name_or_model, str | PathLike):
        raise ValueError(f"A draft must be a model, or the name of one, got {name_or_model!r}.")
    else:
        given = {"dtype": target.dtype, "device_map": {"": target.device}, **kwargs}
        draft = AutoModelForCausalLM.from_pretrained(name_or_model, **given)
    _require_fitting(draft, target)
    lengths = _schedule(schedule, num_assistant_tokens or _FIRST)
    told = draft.generation_config
    told.num_assistant_tokens = _LONGEST if schedule == "adaptive" else _FAR  # at most: the schedule decides
    told.num_assistant_tokens_schedule = "constant"
    told.assistant_confidence_threshold = confidence_threshold
    draft.generate = Drafting(draft, target, lengths, clock)  # type: ignore[assignment]
    return draft


def speculation_stats(assistant: PreTrainedModel | TreeDecoding) -> SpeculationStats:
    """What has come of the drafts of a model that `load_assistant` has prepared, or of a `TreeDecoding`.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(assistant, TreeDecoding):
        return assistant.stats
    drafting = vars(assistant).get("generate")
    if not isinstance(drafting, Drafting):
        raise ValueError(f"This {type(assistant).__name__} keeps no counts. Prepare it with load_assistant().")
    return drafting.stats


def _schedule(schedule: Schedule | DraftLength, tokens: int) -> DraftLength:
    if schedule == "adaptive":
        return Adaptive(tokens, _LONGEST)
    if schedule == "constant":
        return Constant(tokens)
    if schedule == "heuristic":
        return Heuristic(tokens)
    if isinstance(schedule, str):
        raise ValueError(f"`schedule` must be 'adaptive', 'constant' or 'heuristic', got {schedule!r}.")
    return schedule


def _require_fitting(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    if draft is target:
        raise ValueError(
            "The draft must be another model than its target. For a draft by the first layers of the target itself, "
            "call generate(assistant_early_exit=...)."
        )
    if not draft.can_generate() or draft.config.is_encoder_decoder != target.config.is_encoder_decoder:
        raise ValueError(
            f"The draft must be a causal language model, as its target is, got {type(draft).__name__}. Load it with "
            "AutoModelForCausalLM."
        )
    if not fit_vocabulary(draft, target):
        raise ValueError(
            f"The draft must have the vocabulary of its target, of {vocab_size(target)} tokens, got "
            f"{vocab_size(draft)}. Choose one of the same family, or pass `tokenizer` and `assistant_tokenizer` to "
            "generate() with the draft as it is."
        )
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
