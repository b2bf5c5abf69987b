"""What a draft model does in place of `generate()` when it is asked for candidates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from kvboost_hf.assisted.schedule import DraftLength
from kvboost_hf.assisted.stats import SpeculationStats

_LOOK = 4  # tokens after which it is looked whether the text has ended
# Arguments that transformers passes on to an assistant and that a plain forward of token ids can do without.
_PLAIN = frozenset(
    ("attention_mask", "cache_position", "logits_to_keep", "past_key_values", "position_ids", "use_cache")
)


@dataclass(slots=True)
class _Round:
    """A draft whose outcome is not known yet."""

    start: int  # tokens before it
    tokens: list[int]
    forwards: int  # of the draft; one for each token, and for those that were cut off
    draft_s: float
    ended: float  # on the clock
    first: bool  # of its answer: the target's pass took the prompt in, too


class Drafting:
    """Takes the place of `generate` on a draft model, and decides how long drafts are.

    transformers calls it for each round with all tokens so far, from which it also learns what came of the last
    draft. Calls that are not for an assistant go to the model's own `generate()`.

    Tokens are drafted several at a time without looking at them, so that a device is seldom waited for; what comes
    behind an end of the text, or a token that the draft is not sure of, is cut off then.

    Args:
        model: The draft.
        schedule: How many tokens to draft.
        clock: Seconds, as time.perf_counter().
    """

    def __init__(self, model: PreTrainedModel, schedule: DraftLength, clock: Callable[[], float]) -> None:
        self.stats = SpeculationStats()
        self._generate: Callable[..., Any] = type(model).generate  # type: ignore[attr-defined]
        self._model, self._schedule, self._clock = model, schedule, clock
        self._rounds: WeakKeyDictionary[Any, _Round] = WeakKeyDictionary()  # by the cache of each answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `generate()`."""
        if args or not getattr(kwargs.get("generation_config"), "is_assistant", False):
            return self._generate(self._model, *args, **kwargs)
        began, ids, cache = self._clock(), kwargs["input_ids"], kwargs.get("past_key_values")
        first = cache is None
        if not first:
            self._learn(ids, began, self._rounds.pop(cache, None))
        most = int(kwargs.pop("max_new_tokens"))
        count = self._schedule.length(most)
        if self._is_plain(kwargs):
            found, tokens, forwards = self._draft(count, **kwargs)
        else:
            kwargs["min_new_tokens"] = min(kwargs.get("min_new_tokens") or 0, count)
            found = self._generate(self._model, **kwargs, max_new_tokens=count)
            tokens = found.sequences[0, ids.shape[1] :].tolist()
            forwards = len(tokens)
        ended = self._clock()
        self._rounds[found.past_key_values] = _Round(ids.shape[1], tokens, forwards, ended - began, ended, first)
        return found

    def _learn(self, ids: torch.Tensor, now: float, last: _Round | None) -> None:
        """What came of the last draft, now that the tokens behind it are known."""
        if last is None or ids.shape[1] <= last.start:
            return
        said = ids[0, last.start :].tolist()
        accepted = _agreeing(last.tokens, said[:-1])  # the last one is the target's own
        target_s = now - last.ended
        stats = self.stats
        stats.rounds += 1
        stats.drafted += len(last.tokens)
        stats.accepted += accepted
        stats.committed += len(said)
        stats.histogram[accepted] += 1
        stats.draft_s += last.draft_s
        stats.target_s += target_s
        self._schedule.learn(
            drafted=len(last.tokens),
            accepted=accepted,
            draft_s=last.draft_s * len(last.tokens) / last.forwards,
            target_s=target_s,
            first=last.first,
        )

    def _is_plain(self, kwargs: dict[str, Any]) -> bool:
        """Whether the prompt is nothing but token ids, all of them seen."""
        asked = {"input_ids", "generation_config", "logits_processor", "min_new_tokens"}
        given = {name for name, value in kwargs.items() if value is not None} - asked
        mask = kwargs.get("attention_mask")
        return (
            given <= _PLAIN
            and not kwargs.get("min_new_tokens")
            and not self._model.config.is_encoder_decoder
            and (mask is None or bool(mask.all()))
        )

    def _draft(
        self,
        count: int,
        *,
        input_ids: torch.Tensor,
        generation_config: Any,
        logits_processor: Sequence[Any] | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[GenerateDecoderOnlyOutput, list[int], int]:
        model: Any = self._model
        ids: Any = input_ids
        scores: list[torch.Tensor] = []
        sure: list[torch.Tensor] = []
        processors = LogitsProcessorList(logits_processor or ())
        cache = past_key_values
        if cache is None:
            cache = DynamicCache(config=model.config.get_text_config(decoder=True))
            cache.activate_past_recording()  # type: ignore[no-untyped-call]  # refused candidates are cropped
        keep = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        held, start = cache.get_seq_length(), input_ids.shape[1]
        tokens: list[int] = []
        end = None
        while end is None and len(scores) < count:
            output = model(input_ids=ids[:, held:], past_key_values=cache, use_cache=True, **keep)
            cache, held = output.past_key_values, ids.shape[1]
            score = processors(ids, output.logits[:, -1].float())
            likely = score.softmax(-1)
            token = likely.multinomial(1) if generation_config.do_sample else score.argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], 1)
            scores.append(score)
            sure.append(likely.gather(1, token))
            if len(scores) % _LOOK == 0 or len(scores) == count:
                tokens = ids[0, start:].tolist()  # the device is waited for here
                end = _end(tokens, generation_config, torch.cat(sure, 1)[0])
        end = end or len(tokens)
        found = GenerateDecoderOnlyOutput(
            sequences=ids[:, : start + end],
            scores=tuple(scores[:end]),  # type: ignore[arg-type]
            past_key_values=cache,
        )
        return found, tokens[:end], len(tokens)


def _end(tokens: list[int], config: Any, sure: torch.Tensor) -> int | None:
    """How many drafted tokens to hand out, if not all: up to an end of the text, or one that is not sure."""
    ends = config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    stops = [place + 1 for place, token in enumerate(tokens) if token in ends]
    threshold = config.assistant_confidence_threshold
    if threshold:
        stops += [place + 1 for place, each in enumerate(sure.tolist()) if each < threshold]
    return min(stops, default=None)


def _agreeing(drafted: Sequence[int], said: Sequence[int]) -> int:
    """How many first tokens are the same."""
    pairs = zip(drafted, said, strict=False)
    return next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(drafted), len(said)))
