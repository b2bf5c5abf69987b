"""Drafts by heads that were trained for a model: its own multi-token-prediction layers, and DFlash blocks.

transformers runs both within `generate()`, and knows them by arguments (`use_mtp=True`, `speculation_type="dflash"`).
It reads the layers of the former from the files of the checkpoint in each call. Here they are loaded once, checked,
counted, and passed as `assistant_model`, as other drafts are.
"""

import dis
import sys
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
import transformers.cache_utils
import transformers.modeling_layers
import transformers.utils.output_capturing
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import candidate_generator

from kvboost_hf.assisted.head_drafts import CountedCandidates, HeadDraft
from kvboost_hf.assisted.hidden import TextStates
from kvboost_hf.assisted.kept_kv import KeptKV, WarmCandidates, keys_and_values
from kvboost_hf.assisted.rounds import Drafter, DraftSource, SpeculationStats, TreeDraft
from kvboost_hf.assisted.tree import Growth
from kvboost_hf.compat import LAST, HiddenForm, KeptOnModel, decoder_layers, hidden_form, input_device, remember
from kvboost_hf.config import DraftTreeConfig

_MAKE = "_get_candidate_generator"  # the method of a model that makes the drafts of a generate() call
_BLOCKS = ("block_size", "mask_token_id", "target_layer_ids")  # in the configuration of a DFlash drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedAnswer:
    """One answer that heads draft for."""

    states: TextStates  # takes the hidden states of its text, of the layers that the heads read
    growth: Growth  # knows how often tokens were accepted
    config: DraftTreeConfig  # the largest tree
    processors: LogitsProcessorList  # logits processors of the target, without state
    ends: Collection[int]  # tokens that end a text

    def trees(self, source: DraftSource) -> TreeDraft:
        """Trees of what a source drafts."""
        return TreeDraft(source, self.config, self.growth, self.processors, frozenset(self.ends))


class HeadKind(Protocol):
    """What heads of one kind read, and how they draft.

    Attributes:
        reads_whole: Whether they read hidden states of the whole text; else those of its last token, and K/V.
    """

    reads_whole: bool

    def numbers(self, form: HiddenForm) -> Any:
        """The hidden states of the target that they read, as a value of `output_hidden_states`."""
        ...

    def drafting(self, target: Any, form: HiddenForm, answer: DraftedAnswer) -> Drafter:
        """The drafts of one answer.

        Args:
            target: The model.
            form: The hidden states that it returns.
            answer: The answer.
        """
        ...

    def generator(self, target: Any, make: Callable[[], Any], config: Any, processors: Any) -> Any:
        """A generator of candidates for one call of `generate()`.

        Args:
            target: The model.
            make: transformers' own way to make one.
            config: The generation configuration, which is of this call alone.
            processors: Logits processors of the call.
        """
        ...


class Heads(KeptOnModel):
    """What is known of heads, kept on their model.

    Attributes:
        target: Gives the model that they draft for; None if it no longer exists, or they were not prepared.
        kind: How they draft; None if they were not prepared.
        stats: Counts of their rounds under `generate(assistant_model=...)`.
    """

    def __init__(self) -> None:
        self.target: Any = lambda: None
        self.kind: HeadKind | None = None
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

    @property
    def reads(self) -> tuple[int, ...] | str:
        """The layers whose hidden states they read, by their numbers or `LAST`; or why these cannot be had."""
        assert self.kind is not None
        if isinstance(form := hidden_form(self.target()), str):
            return form
        return form.numbered(self.kind.numbers(form))

    @property
    def keeps(self) -> tuple[int, ...] | str:
        """The layers of `reads` whose hidden states are read of the whole text, so that they have to be kept."""
        assert self.kind is not None
        return self.reads if self.kind.reads_whole else ()

    def states(self) -> TextStates | str:
        """What takes the hidden states of one text; or why these cannot be had."""
        assert self.kind is not None
        return layers if isinstance(layers := self.reads, str) else TextStates(layers, whole=self.kind.reads_whole)

    def drafting(self, answer: DraftedAnswer) -> Drafter:
        """The drafts of one answer."""
        target = self.target()
        form = hidden_form(target)
        assert not isinstance(form, str), "without hidden states there are no `states`"
        assert self.kind is not None
        return self.kind.drafting(target, form, answer)

    @classmethod
    def known(cls, draft: Any) -> "Heads | None":
        """The heads that were made of a draft here, or None."""
        found = vars(draft).get(cls._attribute) if isinstance(draft, PreTrainedModel) else None
        return found if isinstance(found, cls) else None


class _Loaded(KeptOnModel):
    """The multi-token-prediction layers that were loaded for a model, as long as somebody holds them."""

    def __init__(self) -> None:
        self.layers: Any = lambda: None


class _OwnLayers:
    """Multi-token-prediction layers of the target's own checkpoint.

    Args:
        layers: transformers' `MtpModel`.
    """

    reads_whole = True

    def __init__(self, layers: Any) -> None:
        self._layers = layers

    def numbers(self, form: HiddenForm) -> int:
        return LAST

    def drafting(self, target: Any, form: HiddenForm, answer: DraftedAnswer) -> Drafter:
        made = self._made(target, _greedy(), answer.processors)
        warm = self._warm(made, answer.states)
        share = share_of(self._layers, target)
        return HeadDraft(warm, answer.states, form.count, answer.growth, answer.ends, share)

    def generator(self, target: Any, make: Callable[[], Any], config: Any, processors: Any) -> Any:
        return self._warm(self._made(target, config, processors))

    def _warm(self, made: Any, text: TextStates | None = None) -> WarmCandidates:
        heads = self._layers
        kept = KeptKV(heads, heads.num_mtp_layers, lambda: _once(heads, self._like), _stats(heads))
        return WarmCandidates(made, "mtp_cache", kept, text)

    @torch.no_grad()
    def _like(self) -> list[torch.Tensor]:
        """Keys and values of the layers, of a few tokens."""
        heads = self._layers
        ids = torch.zeros(1, heads.num_mtp_layers, dtype=torch.long, device=heads.embed_tokens.weight.device)
        weight = next(heads.layers.parameters())
        states = weight.new_zeros(1, ids.shape[1], heads.config.hidden_size)
        cache: Any = transformers.cache_utils.MtpCache(config=heads.config)
        at = torch.arange(ids.shape[1], device=weight.device)[None]
        run = heads.forward  # past hooks
        run(input_ids=ids, last_hidden_states=states, attention_mask=None, position_ids=at, mtp_cache=cache)
        return keys_and_values(cache)

    def _made(self, target: Any, config: Any, processors: Any) -> Any:
        """transformers' generator of candidates, with layers that were loaded before: it has `_FIELDS`."""
        layers, kind = self._layers, candidate_generator.MTPCandidateGenerator
        made: Any = kind.__new__(kind)
        made.num_mtp_layers, made.model_kwargs_overrides = layers.num_mtp_layers, {"output_hidden_states": -1}
        made.device, made.mtp_model = next(layers.layers.parameters()).device, layers
        made.mtp_cache = transformers.cache_utils.MtpCache(config=target.config.get_mtp_config())
        made.mtp_cache.activate_past_recording()
        made.do_sample, made.logits_processor, made.is_main_model_prefill = config.do_sample, processors, True
        return made


class _Blocks:
    """A DFlash drafter.

    Args:
        draft: The drafter.
    """

    reads_whole = True

    def __init__(self, draft: Any) -> None:
        self._draft = draft

    def numbers(self, form: HiddenForm) -> list[int]:
        return [layer + 1 for layer in self._draft.config.target_layer_ids]

    def drafting(self, target: Any, form: HiddenForm, answer: DraftedAnswer) -> Drafter:
        kind: Any = candidate_generator.DFlashTokenCandidateGenerator
        given = (self._draft, target.get_input_embeddings(), target.get_output_embeddings(), _greedy())
        made = kind(*given, logits_processor=answer.processors if len(answer.processors) else None)
        warm = self._warm(made, target, answer.states)
        share = share_of(self._draft, target)
        return HeadDraft(warm, answer.states, form.count, answer.growth, answer.ends, share)

    def generator(self, target: Any, make: Callable[[], Any], config: Any, processors: Any) -> Any:
        config.speculation_type = "dflash"
        return self._warm(make(), target)

    def _warm(self, made: Any, target: Any, text: TextStates | None = None) -> WarmCandidates:
        draft = self._draft
        kept = KeptKV(draft, 0, lambda: _once(draft, lambda: self._like(target)), _stats(draft))
        return WarmCandidates(made, "cache", kept, text, draft.config.block_size)

    @torch.no_grad()
    def _like(self, target: Any) -> list[torch.Tensor]:
        """Keys and values of the layers, of a few tokens."""
        draft, size = self._draft, self._draft.config.block_size
        weight, read = next(draft.parameters()), len(draft.config.target_layer_ids)
        width = target.config.get_text_config(decoder=True).hidden_size
        kind: Any = transformers.cache_utils.DFlashCache
        cache = kind(config=draft.config)
        cache.set_previous_accepted_tokens(1)
        draft.forward(  # past hooks
            noise_embeds=weight.new_zeros(1, size, width),
            context_hidden_states=weight.new_zeros(1, 1, read * width),
            position_ids=torch.arange(1 + size, device=weight.device)[None],
            attention_mask=None,
            cache=cache,
        )
        return keys_and_values(cache)


def share_of(draft: Any, target: PreTrainedModel) -> float:
    """The time of a pass of a draft, over that of its target, as expected by their layers; the output layer is one."""
    own: Any = draft.config.get_text_config(decoder=True)
    theirs: Any = target.config.get_text_config(decoder=True)
    layers: int = getattr(draft, "num_mtp_layers", None) or own.num_hidden_layers
    wide: float = own.hidden_size / theirs.hidden_size
    return (layers + 1) / (int(theirs.num_hidden_layers) + 1) * wide**2


def _greedy() -> GenerationConfig:
    """Of drafts that are chosen greedily, whatever the target does, and end where somebody else says it."""
    return GenerationConfig(do_sample=False, max_length=sys.maxsize)  # type: ignore[no-untyped-call]


def _once(draft: PreTrainedModel, like: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """What `like` gives, once for each type and device of a draft."""
    weight = next(draft.parameters())
    return remember(draft, ("K/V of heads", weight.dtype, weight.device), like)


def _stats(draft: PreTrainedModel) -> SpeculationStats:
    return Heads.of(draft).stats


def hidden_bytes(draft: PreTrainedModel) -> int:
    """Bytes of the hidden states of one token that are kept for a draft; 0 if none are."""
    heads = Heads.known(draft)
    layers = heads.keeps if heads is not None else ()
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
    _Loaded.of(target).layers = weakref.ref(heads)
    return prepared(heads, target, _OwnLayers(heads))


def is_dflash(config: Any) -> bool:
    """Whether a configuration is that of a DFlash drafter."""
    return all(getattr(config, name, None) is not None for name in _BLOCKS)


def prepare_blocks(draft: PreTrainedModel, target: PreTrainedModel) -> PreTrainedModel:
    """Prepare a DFlash drafter for a target; returns it.

    Raises:
        ValueError: the drafter was made for a target of another width, depth or vocabulary, or this release of
            transformers shows it no hidden states of single layers.
    """
    _require_blocks_fit(draft, target)
    config: Any = draft.config
    if getattr(config, "vocab_size", None) is None:  # generate() compares that of a draft with the target's
        config.vocab_size = target.config.get_text_config(decoder=True).vocab_size
    return prepared(draft, target, _Blocks(draft))


def require_can_read(draft: PreTrainedModel, target: PreTrainedModel) -> HiddenForm:
    """The hidden states of a target that heads draft for.

    Raises:
        ValueError: it cannot give them, or keeps states.
    """
    names = f"The draft, a {type(draft).__name__},"
    if isinstance(form := hidden_form(target), str):
        raise ValueError(f"{names} reads hidden states, and a {type(target).__name__} cannot give them: {form}.")
    stateful: Any = target
    if stateful._is_stateful:
        raise ValueError(f"{names} drafts for no model with states, as a {type(target).__name__} is, in transformers.")
    return form


def _require_blocks_fit(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    config: Any = draft.config
    text: Any = target.config.get_text_config(decoder=True)
    names = f"The drafter, a {type(draft).__name__},"
    if not hasattr(transformers.utils.output_capturing, "selected_hidden_states"):
        raise ValueError(
            f"{names} reads the hidden states of some layers, which transformers {transformers.__version__} shows in "
            "another form than is known here. Install transformers 5.24 or later."
        )
    form = require_can_read(draft, target)
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


def prepared(draft: PreTrainedModel, target: PreTrainedModel, kind: HeadKind) -> PreTrainedModel:
    """Note that heads draft for a target, and have its `generate()` know them as `assistant_model`; returns them."""
    heads = Heads.of(draft)
    heads.target, heads.kind, heads.stats = weakref.ref(target), kind, SpeculationStats()
    if vars(target).get(_MAKE) is None:
        setattr(target, _MAKE, MethodType(_make_generator, target))
    return draft


def _make_generator(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands before the method of this name: heads that come as `assistant_model` make the drafts of a call.

    Multi-token-prediction layers that were loaded before make those of `use_mtp=True`, too.

    Raises:
        ValueError: the heads were prepared for another model.
    """
    draft = kwargs.get("assistant_model")
    if draft is None and getattr(generation_config, "use_mtp", None):
        draft = _Loaded.of(self).layers()
    heads = Heads.known(draft)
    if heads is None:
        return getattr(type(self), _MAKE)(self, generation_config, *args, **kwargs)
    heads.require_target(self)
    assert heads.kind is not None

    def make() -> Any:
        return getattr(type(self), _MAKE)(self, generation_config, *args, **kwargs)

    made = heads.kind.generator(self, make, generation_config, kwargs.get("logits_processor"))
    return CountedCandidates(made, heads.stats)


_FIELDS = frozenset(
    "num_mtp_layers model_kwargs_overrides device mtp_model mtp_cache do_sample logits_processor "
    "is_main_model_prefill".split()
)


def _fields_of_generator() -> frozenset[str]:
    """The fields that transformers' generator of candidates has from its beginning."""
    made: Any = candidate_generator.MTPCandidateGenerator.__init__
    return frozenset(each.argval for each in dis.get_instructions(made) if each.opname == "STORE_ATTR")
