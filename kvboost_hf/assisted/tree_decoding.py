"""`TreeDecoding`: speculative decoding with trees of drafts, for `generate(custom_generate=...)`."""

import inspect
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from kvboost_hf.assisted.branches import lender_of, recording
from kvboost_hf.assisted.chains import continuing, drafting_reason, keeps_states
from kvboost_hf.assisted.heads import DraftedAnswer, Heads, share_of
from kvboost_hf.assisted.hidden import TextStates, asking_for
from kvboost_hf.assisted.limits import fitted, may_keep_state, vocab_size
from kvboost_hf.assisted.lookup import LookupAssistant, LookupDraft
from kvboost_hf.assisted.rounds import Drafter, ModelSource, Rounds, SpeculationStats, TreeDraft
from kvboost_hf.assisted.row_rounds import RowRounds, columns_kept, padding_of, require_rows
from kvboost_hf.assisted.text import DraftedText
from kvboost_hf.assisted.tree import Tree
from kvboost_hf.compat import (
    CACHE,
    give_back_tokenizer,
    input_device,
    require_generates,
    require_one_process,
    running_streamer,
    waits_for_peers,
)
from kvboost_hf.config import DraftTreeConfig

_log = logging.getLogger(__name__)
# Chains of drafts that are asked for besides change no answer.
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)


class _SignatureOfCall:
    """The signature of an object's `__call__`. When generate() asks for it, it gets its tokenizer back."""

    def __get__(self, trees: "TreeDecoding | None", kind: type) -> inspect.Signature:
        if trees is None:
            raise AttributeError("__signature__")  # that of a class is of its constructor
        give_back_tokenizer()
        return inspect.signature(trees.__call__)


class TreeDecoding:
    """Speculative decoding with trees of drafts, to be passed to `generate()` as `custom_generate`.

    A chain of drafts ends at the first token that the target rejects. A tree has alternatives to that token, and
    continues if the target's is among them. The target verifies a whole tree in one pass. Answers are those of plain
    `generate()`: token for token with greedy decoding in float32; with sampling, each token is drawn from the target's
    distribution, whether it is in the tree or not.

    A model with states, such as Qwen3-Next, gets chains: states cannot branch. transformers refuses all other drafts
    for it. Where drafts are rejected, the states stay where they were, and the next pass computes the accepted tokens
    again in front of its drafts.

    One object can be used for many calls, from one thread at a time. It learns from each how far to draft.

    Args:
        draft: A smaller model with the same vocabulary, on the same device, or a `lookup_assistant`. With
            `attach(draft)`, K/V of its prompts is reused.
        config: How large trees are.
        clock: Seconds.

    Raises:
        ValueError: for a draft that cannot compute drafted tokens in one forward, or a `config` that is none; and in
            a call, for a target of another vocabulary, or that cannot, beams and other ways of decoding, a prompt as
            embeddings, or attentions or hidden states to return; with several rows also for what looks at all rows
            together, and a streamer.

    Example:
        >>> from kvboost_hf import ChunkReuseCache, TreeDecoding, speculation_stats
        >>> from kvboost_hf.assets import load_embedded, load_embedded_draft
        >>> model, tokenizer = load_embedded()
        >>> trees = TreeDecoding(load_embedded_draft())
        >>> inputs = tokenizer("Maria lives in Rome. Where does Maria live?", return_tensors="pt")
        >>> out = model.generate(
        ...     **inputs, custom_generate=trees, cache=ChunkReuseCache(model), max_new_tokens=12
        ... )
        >>> out.equal(model.generate(**inputs, max_new_tokens=12))
        True
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        config: DraftTreeConfig | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.draft, self.config = draft, config if config is not None else DraftTreeConfig()
        if not isinstance(self.config, DraftTreeConfig):
            raise ValueError(f"`config` must be a DraftTreeConfig or None, got {config!r}. Leave it out.")
        self._rounds = Rounds(self.config, clock)
        self._rows = RowRounds(self._rounds, self.config)
        self._fitted = draft
        if not isinstance(draft, torch.nn.Module):
            raise ValueError(
                f"`draft` must be a model that is loaded, or what load_assistant() or lookup_assistant() returns, got "
                f"{draft!r:.80}."
            )
        if not isinstance(draft, LookupAssistant) and Heads.known(draft) is None:
            _require_checks(draft, "draft")

    @property
    def stats(self) -> SpeculationStats:
        """Counts of all rounds so far."""
        return self._rounds.stats

    __signature__ = _SignatureOfCall()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Decode, as `generate()` asks a custom loop to; returns the result of `generate()`."""
        self._require_fits(model, generation_config, model_kwargs)
        if len(input_ids) > 1:
            return self._answer_rows(
                model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
            )
        config: Any = generation_config
        keep = columns_kept(model_kwargs)
        (pads,) = padding_of(input_ids, keep)
        # transformers keeps the streamer from functions of a user's own.
        streamer = running_streamer()
        text = DraftedText(input_ids[0], pads, stopping_criteria, logits_processor, config, streamer=streamer)
        states = self._states(model, config, model_kwargs)
        drafting = self._drafting(model, logits_processor, text.ends, states)
        with recording(model_kwargs[CACHE]):
            cache, position = self._begin(model, text, keep, config, drafting, states, model_kwargs)
            branches = continuing(model, cache, position, keep, states)
            while not text.done:
                self._rounds.run(branches, drafting, text.ids, text.room, text.take)
            branches.end()
        if not config.return_dict_in_generate:
            return text.whole
        told: Any = {name: tuple(each) for name, each in text.returned.items()}
        return GenerateDecoderOnlyOutput(**(told | {"sequences": text.whole, CACHE: cache}))

    def _answer_rows(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Decode several rows. States of several rows cannot lag behind their texts: for these there are no drafts."""
        require_rows(processors, criteria)
        read = [self._states(model, config, model_kwargs) for _ in input_ids]
        texts = [each for each in read if each is not None]

        def drafter(own: LogitsProcessorList, ends: frozenset[int], states: TextStates | None) -> Drafter:
            return self._drafting(model, own, ends, states)

        if states := keeps_states(model):
            _log.warning("No drafts for %d rows: a %s keeps states.", len(input_ids), type(model).__name__)
        with recording(model_kwargs[CACHE]):
            made = None if states else drafter
            return self._rows.answer(model, input_ids, processors, criteria, config, model_kwargs, made, texts)

    def _states(
        self, model: PreTrainedModel, config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> TextStates | None:
        """The hidden states of an answer's text that the draft reads; None if it reads none."""
        if (heads := Heads.known(self.draft)) is None:
            return None
        heads.require_target(model)
        if isinstance(states := heads.states(), str):
            raise ValueError(f"Heads read hidden states, and a {type(model).__name__} cannot give them: {states}.")
        if not states.whole:
            return states
        if config.prefill_chunk_size is not None:
            raise ValueError(
                f"`prefill_chunk_size` must be None with heads, which read hidden states of the whole prompt, got "
                f"{config.prefill_chunk_size}. Leave it out."
            )
        cache = model_kwargs.get(CACHE)
        if cache is not None and cache.get_seq_length():
            raise ValueError(
                f"Heads read hidden states of the whole prompt, of which the cache holds {cache.get_seq_length()} "
                "tokens. Pass a ChunkReuseCache, which keeps them, or an empty cache."
            )
        return states

    def _drafting(
        self,
        model: PreTrainedModel,
        processors: LogitsProcessorList,
        ends: frozenset[int],
        states: TextStates | None = None,
    ) -> Drafter:
        """The drafts of an answer that some tokens end."""
        draft = self._draft_for(model)
        if states is not None and (heads := Heads.known(draft)) is not None:
            own = _without_state(processors)
            return heads.drafting(
                DraftedAnswer(states=states, growth=self._rounds.growth, config=self.config, processors=own, ends=ends)
            )
        if isinstance(draft, LookupAssistant):
            return LookupDraft(draft, self._rounds.growth, ends)
        return TreeDraft(
            ModelSource(draft, share_of(draft, model)),
            self.config,
            self._rounds.growth,
            _without_state(processors),
            ends,
            chains=keeps_states(model),
        )

    def _begin(
        self,
        model: PreTrainedModel,
        text: DraftedText,
        keep: torch.Tensor | None,
        config: Any,
        drafting: Drafter,
        states: TextStates | None,
        model_kwargs: dict[str, Any],
    ) -> tuple[Any, torch.Tensor]:
        """Run the prompt, with a chain of drafts behind it if the cache is empty and there is no padding.

        Heads draft nothing behind it, since they read its hidden states first. Returns the cache, and the position of
        the next token to compute.
        """
        began = self._rounds.clock()
        generator: Any = model
        cache: Any = model_kwargs.get(CACHE)
        ids, positions = text.whole, model_kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        chain = Tree()
        alone = not keeps_states(model) and keep is None and positions.ndim == 2  # there are no states to go back to
        alone = alone and cache is not None and cache.get_seq_length() == 0
        records = alone and text.room > 1 and config.prefill_chunk_size is None
        if records:
            chain = drafting.grow(text.ids, text.room - 1, chain=True)
            _extend(model_kwargs, positions, len(chain))
            cache.activate_past_recording()
        drafted = self._rounds.clock()
        ids = torch.cat([ids, ids.new_tensor([chain.tokens])], dim=1) if len(chain) else ids
        if states is not None and states.whole:
            model_kwargs["output_hidden_states"] = asking_for(model, states.layers)
        output = generator._prefill(ids, config, model_kwargs)
        if states is not None and states.whole:
            states.append({layer: output.hidden_states[layer][:, text.pads :] for layer in states.layers})
            states.cache = getattr(output, CACHE)
        taken = text.take(chain, output.logits[0, -1 - len(chain) :])
        verified, cache = self._rounds.clock(), getattr(output, CACHE)
        if len(chain):
            drafting.keep(taken.kept)
        if records:  # also of nothing: windows of transformers 5.17 then let go of what is behind them
            cache.crop(len(taken.kept) - len(chain))
        else:
            cache.activate_past_recording()
        self._rounds.note(chain, taken, drafting.passes, (began, drafted, verified, self._rounds.clock()), first=True)
        return cache, positions[..., -1:] + 1 + len(taken.kept)

    def _draft_for(self, model: PreTrainedModel) -> PreTrainedModel:
        """The draft with the vocabulary of a target."""
        if isinstance(self.draft, LookupAssistant) or Heads.known(self.draft) is not None:
            return self.draft
        if vocab_size(self._fitted) != vocab_size(model):
            self._fitted = fitted(self.draft, model, name="the model that generates")
        return self._fitted

    def _require_fits(self, model: PreTrainedModel, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
        self._draft_for(model)
        _require_checks(model, "model that generates")
        if config.num_beams > 1:
            raise ValueError(
                f"`num_beams` must be 1 with trees of drafts, got {config.num_beams}. Generate without drafts."
            )
        if (mode := config.get_generation_mode()) not in _MODES:
            raise ValueError(
                "Arguments of generate() must ask for greedy decoding or sampling with trees of drafts, got those of "
                f"{mode.value}. Generate without drafts."
            )
        if (cache := model_kwargs.get(CACHE)) is not None and not keeps_states(model):
            lender_of(cache)
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name):
                raise ValueError(f"`{name}` cannot be returned with trees of drafts. Leave it out.")
        if waits_for_peers():
            raise ValueError(
                "`synced_gpus` must be False with trees of drafts, got True: peers would wait for forwards that never "
                "come. Call generate(assistant_model=load_assistant(...))."
            )
        if not model_kwargs.get("use_cache", True):
            raise ValueError("`use_cache` must be True with trees of drafts. Leave it out.")
        refused = ["inputs_embeds"]
        if model.config.get_text_config(decoder=True) is model.config:  # else they tell where images are
            refused.append("token_type_ids")
        for name in refused:
            if model_kwargs.get(name) is not None:
                raise ValueError(f"`{name}` must be None with trees of drafts, which know ids only. Pass `input_ids`.")
        there = input_device(model)
        is_model = not isinstance(self.draft, LookupAssistant) and Heads.known(self.draft) is None
        here = input_device(self.draft) if is_model else self.draft.device
        if here != there:
            warnings.warn(
                f"The draft is on {here} and its target on {there}. Move it with draft.to({str(there)!r}).",
                stacklevel=4,
            )


def _extend(model_kwargs: dict[str, Any], positions: torch.Tensor, count: int) -> None:
    """Extend the arguments of a prompt by `count` tokens."""
    if model_kwargs.get("position_ids") is not None:
        behind = torch.arange(1, count + 1, device=positions.device)
        model_kwargs["position_ids"] = torch.cat([positions, positions[..., -1:] + behind], dim=-1)
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        model_kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(1, count)], dim=1)
    if "logits_to_keep" in model_kwargs:
        model_kwargs["logits_to_keep"] = count + 1


def _without_state(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors without state, which may be called with drafts; a user's own might count its calls."""
    return LogitsProcessorList(each for each in processors if not may_keep_state(each))


def _require_checks(model: PreTrainedModel, role: str) -> None:
    require_generates(model)
    require_one_process(model, "Trees of drafts")
    if (reason := drafting_reason(model)) is None:
        return
    if keeps_states(model):
        raise ValueError(
            f"The {role}, a {type(model).__name__}, cannot compute several drafted tokens in one forward: {reason}. "
            "Generate without drafts."
        )
    raise ValueError(
        f"The {role}, a {type(model).__name__}, cannot compute trees of tokens: {reason}. Draft chains instead, "
        "with generate(assistant_model=load_assistant(...))."
    )
