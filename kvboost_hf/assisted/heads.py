"""Drafts by heads that were trained for a model: its own multi-token-prediction layers, and DFlash blocks.

transformers runs both within `generate()`, and knows them by arguments (`use_mtp=True`, `speculation_type="dflash"`).
It reads the layers of the former from the files of the checkpoint in each call. Here they are loaded once, checked,
counted, and passed as `assistant_model`, as other drafts are.
"""

import dis
import sys
import time
import weakref
from collections.abc import Collection
from types import MethodType
from typing import Any

import torch
import transformers.cache_utils
import transformers.modeling_layers
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import candidate_generator

from kvboost_hf.assisted.head_drafts import HeadDraft
from kvboost_hf.assisted.hidden import TextStates
from kvboost_hf.assisted.rounds import SpeculationStats
from kvboost_hf.assisted.tree import Growth
from kvboost_hf.compat import KeptOnModel, decoder_layers, hidden_form, input_device

_MAKE = "_get_candidate_generator"  # the method of a model that makes the drafts of a generate() call
_BLOCKS = ("block_size", "mask_token_id", "target_layer_ids")  # in the configuration of a DFlash drafter


class Heads(KeptOnModel):
    """What is known of heads, kept on their model.

    Attributes:
        target: Gives the model that they draft for; None if it no longer exists, or they were not prepared.
        dflash: They draft blocks, and are no layers of the target's own.
        stats: Counts of their rounds under `generate(assistant_model=...)`.
    """

    def __init__(self) -> None:
        self.target: Any = lambda: None
        self.dflash = False
        self.stats = SpeculationStats()

    def require_target(self, model: PreTrainedModel) -> None:
        """Raise if they were prepared for another model.

        Raises:
            ValueError: they were.
        """
        if self.target() is not model:
            raise ValueError(
                f"The heads were prepared for another model than this {type(model).__name__}. Prepare them with "
                "load_assistant(..., target=model)."
            )

    def reads(self, draft: Any) -> tuple[int, ...] | str:
        """The layers whose hidden states they read, by their numbers or `LAST`; or why these cannot be had."""
        if isinstance(form := hidden_form(self.target()), str):
            return form
        return form.numbered([layer + 1 for layer in draft.config.target_layer_ids] if self.dflash else -1)

    def drafting(
        self, draft: Any, states: TextStates, growth: Growth, processors: LogitsProcessorList, ends: Collection[int]
    ) -> HeadDraft:
        """The drafts of one answer.

        Args:
            draft: The heads.
            states: Takes the hidden states of its text, of the layers that the heads read.
            growth: Knows how often tokens were accepted.
            processors: Logits processors of the target, without state.
            ends: Tokens that end a text.
        """
        target = self.target()
        form = hidden_form(target)
        assert not isinstance(form, str), "without hidden states there are no `states`"
        config = GenerationConfig(do_sample=False, max_length=sys.maxsize)  # type: ignore[no-untyped-call]
        if self.dflash:
            kind: Any = candidate_generator.DFlashTokenCandidateGenerator
            given = (draft, target.get_input_embeddings(), target.get_output_embeddings(), config)
            made = kind(*given, logits_processor=processors if len(processors) else None)
        else:
            made = _by_own_layers(draft, target, config, processors)
        return HeadDraft(made, states, form.count, growth, ends)

    @classmethod
    def known(cls, draft: Any) -> "Heads | None":
        """Those of a draft that was prepared here, or None."""
        found = vars(draft).get(cls._attribute) if isinstance(draft, PreTrainedModel) else None
        return found if isinstance(found, cls) else None


def hidden_bytes(draft: PreTrainedModel) -> int:
    """Bytes of the hidden states of one token that a draft reads; 0 if it reads none."""
    heads = Heads.known(draft)
    layers = heads.reads(draft) if heads is not None else ()
    if heads is None or isinstance(layers, str):
        return 0
    target = heads.target()
    return len(layers) * int(target.config.get_text_config(decoder=True).hidden_size) * int(target.dtype.itemsize)


def load_own_heads(target: PreTrainedModel) -> PreTrainedModel | str:
    """The multi-token-prediction layers of a checkpoint, loaded for its model; or why there are none to draft with.

    Args:
        target: A model that was loaded from the checkpoint.
    """
    config: Any = target.config.get_text_config(decoder=True)
    if not getattr(config, "num_mtp_layers", None):
        return "its configuration names no multi-token-prediction layers (`num_mtp_layers`)"
    kind: Any = getattr(transformers.modeling_layers, "MtpModel", None)
    if kind is None:
        return f"transformers {transformers.__version__} runs no multi-token-prediction layers; 5.24 does"
    if _fields_of_generator() != _FIELDS:
        return (
            f"transformers {transformers.__version__} makes drafts of such layers in another way than is known here "
            "(generate(use_mtp=True) runs them)"
        )
    stateful: Any = target
    if stateful._is_stateful:
        return "transformers takes no such drafts for models with states"
    layers = decoder_layers(target)
    device = next(layers[-1].parameters()).device if layers else input_device(target)
    try:
        heads = kind.from_pretrained(target, device_map={"": device}).eval()
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        return f"its multi-token-prediction layers cannot be loaded ({type(error).__name__}: {error})"
    return _prepared(heads, target, dflash=False)


def is_dflash(config: Any) -> bool:
    """Whether a configuration is that of a DFlash drafter."""
    return all(getattr(config, name, None) is not None for name in _BLOCKS)


def prepare_blocks(draft: PreTrainedModel, target: PreTrainedModel) -> PreTrainedModel:
    """Prepare a DFlash drafter for a target; returns it.

    Raises:
        ValueError: the drafter was made for a target of another width, depth or vocabulary.
    """
    _require_blocks_fit(draft, target)
    config: Any = draft.config
    if getattr(config, "vocab_size", None) is None:  # generate() compares that of a draft with the target's
        config.vocab_size = target.config.get_text_config(decoder=True).vocab_size
    return _prepared(draft, target, dflash=True)


def _require_blocks_fit(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    config: Any = draft.config
    text: Any = target.config.get_text_config(decoder=True)
    names = f"The drafter, a {type(draft).__name__},"
    if isinstance(form := hidden_form(target), str):
        raise ValueError(f"{names} reads hidden states, and a {type(target).__name__} cannot give them: {form}.")
    stateful: Any = target
    if stateful._is_stateful:
        raise ValueError(f"{names} drafts for no model with states, as a {type(target).__name__} is, in transformers.")
    if config.hidden_size != text.hidden_size:
        raise ValueError(
            f"{names} reads hidden states of {config.hidden_size} numbers, and those of its target, a "
            f"{type(target).__name__}, have {text.hidden_size}. Choose a drafter that was trained for this target."
        )
    deepest, layers = max(config.target_layer_ids), form.count - 1
    if not 0 <= min(config.target_layer_ids) <= deepest < layers:
        raise ValueError(
            f"{names} reads the layers {list(config.target_layer_ids)}, and its target has those from 0 to "
            f"{layers - 1}. Choose a drafter that was trained for this target."
        )
    embeddings: Any = target.get_input_embeddings()
    if not 0 <= config.mask_token_id < embeddings.num_embeddings:
        raise ValueError(
            f"{names} stands the token {config.mask_token_id} for what is to be drafted, and its target has tokens up "
            f"to {embeddings.num_embeddings - 1}. Choose a drafter that was trained for this target."
        )


def _prepared(draft: PreTrainedModel, target: PreTrainedModel, *, dflash: bool) -> PreTrainedModel:
    heads = Heads.of(draft)
    heads.target, heads.dflash, heads.stats = weakref.ref(target), dflash, SpeculationStats()
    if vars(target).get(_MAKE) is None:
        setattr(target, _MAKE, MethodType(_make_generator, target))
    return draft


def _make_generator(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands before the method of this name: heads that come as `assistant_model` make the drafts of a call.

    Raises:
        ValueError: the heads were prepared for another model.
    """
    draft = kwargs.get("assistant_model")
    heads = Heads.known(draft)
    if heads is None:
        return getattr(type(self), _MAKE)(self, generation_config, *args, **kwargs)
    heads.require_target(self)
    if heads.dflash:
        generation_config.speculation_type = "dflash"  # of a copy that generate() has made for the call
        return _Counted(getattr(type(self), _MAKE)(self, generation_config, *args, **kwargs), heads.stats)
    return _Counted(_by_own_layers(draft, self, generation_config, kwargs.get("logits_processor")), heads.stats)


_FIELDS = frozenset(
    "num_mtp_layers model_kwargs_overrides device mtp_model mtp_cache do_sample logits_processor "
    "is_main_model_prefill".split()
)


def _fields_of_generator() -> frozenset[str]:
    """The fields that transformers' generator of candidates has from its beginning."""
    made: Any = candidate_generator.MTPCandidateGenerator.__init__
    return frozenset(each.argval for each in dis.get_instructions(made) if each.opname == "STORE_ATTR")


def _by_own_layers(heads: Any, target: Any, config: Any, logits_processor: Any) -> Any:
    """transformers' generator of candidates, with layers that were loaded before: it has `_FIELDS`."""
    kind: Any = candidate_generator.MTPCandidateGenerator
    made = kind.__new__(kind)
    made.num_mtp_layers, made.model_kwargs_overrides = heads.num_mtp_layers, {"output_hidden_states": -1}
    made.device, made.mtp_model = next(heads.layers.parameters()).device, heads
    made.mtp_cache = transformers.cache_utils.MtpCache(config=target.config.get_mtp_config())
    made.mtp_cache.activate_past_recording()
    made.do_sample, made.logits_processor, made.is_main_model_prefill = config.do_sample, logits_processor, True
    return made


class _Counted:
    """A generator of candidates whose rounds are counted.

    Args:
        inner: The generator.
        stats: Takes the counts.
    """

    requires_model_outputs = True

    def __init__(self, inner: Any, stats: SpeculationStats) -> None:
        self._inner, self._stats = inner, stats
        self._drafted = 0
        self._seconds = 0.0, 0.0  # of drafting, and on the clock when it ended

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """What each forward of the target is to be passed."""
        found: dict[str, Any] = self._inner.model_kwargs_overrides
        return found

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """As transformers' generators."""
        began = time.perf_counter()
        found = self._inner.get_candidates(input_ids, **kwargs)
        ended = time.perf_counter()
        self._drafted, self._seconds = found[0].shape[1] - input_ids.shape[1], (ended - began, ended)
        return found

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """As transformers' generators."""
        self._inner.update_candidate_strategy(input_ids, scores, num_matches)
        accepted, (draft_s, ended) = int(num_matches), self._seconds
        if self._drafted:
            self._stats.add_round(self._drafted, accepted, accepted + 1, (draft_s, time.perf_counter() - ended, 0.0))
        else:
            self._stats.plain += 1
