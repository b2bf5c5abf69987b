"""`Drafting` replaces `generate()` of a draft model: it drafts candidates, and decides how many.

`HostReads` decides when their tokens are read from the device, and `Outcome` observes how many the target accepts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from kvboost_hf.assisted.limits import Pauses, before_end, end_tokens, harmless_token, learned_positions
from kvboost_hf.assisted.rounds import SpeculationStats
from kvboost_hf.assisted.schedule import ConfidentLength, DraftLength
from kvboost_hf.compat import CACHE, cache_in, own_hook, run_model
from kvboost_hf.ngrams import common_prefix

# Arguments that transformers passes to an assistant and that a forward over token ids does not need.
_PLAIN = frozenset(("attention_mask", "cache_position", "logits_to_keep", CACHE, "position_ids", "use_cache"))
_SELDOM = 4  # passes between two reads that are expensive
# Of a pass: a usual draft wastes as much on tokens that an earlier read would have avoided.
_EXPENSIVE = 0.25
_FADE = 0.9  # weight of earlier times after each read


@dataclass(slots=True)
class _Round:
    """A draft whose outcome is still unknown."""

    start: int  # tokens before it
    tokens: list[int]
    sure: list[float]  # the probability that the draft gave each of them; empty if that is not known
    forwards: int  # of the draft; one for each token, and for those that were cut off
    draft_s: float
    ended: float  # on the clock
    first: bool  # of its answer: the draft took the prompt in, too
    ends: bool  # the text, with its last token
    outcome: "Outcome | None"


class Drafting:
    """Replaces `generate` of a draft model, and decides how many tokens to draft.

    transformers calls it for each round with all tokens so far, which show how many of the last draft were accepted;
    for the last draft of an answer, the target's cache shows it. Calls that are not for an assistant go to the model's
    own `generate()`.

    A draft ends at an end of text, before a token that completes a stop string, or at a token below the confidence
    threshold. A copy keeps what the schedule has
    learned, counts its own rounds, and has no target.

    Args:
        model: The draft.
        target: Whose passes to time.
        schedule: How many tokens to draft.
        clock: Seconds, as time.perf_counter().
    """

    def __init__(
        self, model: PreTrainedModel, target: PreTrainedModel, schedule: DraftLength, clock: Callable[[], float]
    ) -> None:
        self._generate: Callable[..., Any] = type(model).generate  # type: ignore[attr-defined]
        self._model, self._schedule, self._clock = model, schedule, clock
        self.pauses = Pauses(learned_positions(model))
        self._begin(ref(target))

    def _begin(self, target: "ref[PreTrainedModel] | None") -> None:
        self.stats, self._host_reads = SpeculationStats(), HostReads()
        self._target = target
        self._awaited: Outcome | None = None
        self._rounds: dict[ref[Any], _Round] = {}  # by the cache of each answer

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("_generate", "_model", "_schedule", "_clock", "pauses")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin(None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `generate()`."""
        if args or not getattr(kwargs.get("generation_config"), "is_assistant", False):
            return self._generate(self._model, *args, **kwargs)
        is_pair = self._model.config.is_encoder_decoder
        began, cache = self._clock(), cache_in(kwargs)
        ids = kwargs["decoder_input_ids" if is_pair else "input_ids"]
        last = self._rounds.pop(ref(cache), None) if cache is not None else None
        if last is not None and ids.shape[1] > last.start:
            said = ids[0, last.start :].tolist()
            accepted = common_prefix(last.tokens, said[:-1])  # the last one is the target's own
            self._learn(last, accepted, len(said), began)
        most = self.pauses.room(ids.shape[1], int(kwargs.pop("max_new_tokens")))
        if self._is_plain(kwargs):
            found, tokens, sure, forwards = self._draft(most, **kwargs)
        else:
            if cache is None and not is_pair:  # whose masks are those of the encoder
                _cover(kwargs, ids)
            config = kwargs["generation_config"]  # a copy, for drafts: they end before stop strings in any case
            config.stop_strings, config.token_healing = None, False
            count = self._schedule.length(most)
            kwargs["min_new_tokens"] = min(kwargs.get("min_new_tokens") or 0, count)
            found = self._generate(self._model, **kwargs, max_new_tokens=count)
            tokens, sure = found.sequences[0, ids.shape[1] :].tolist(), []
            forwards = len(tokens)
        tokens = _cut(found, ids, tokens, kwargs["generation_config"])
        sure = sure[: len(tokens)]
        ended = self._clock()
        ends = bool(tokens) and tokens[-1] in end_tokens(kwargs["generation_config"].eos_token_id)
        outcome = self._await_outcome(ids.shape[1] + len(tokens))
        self._rounds[ref(getattr(found, CACHE), self._over)] = _Round(
            ids.shape[1], tokens, sure, forwards, ended - began, ended, cache is None, ends, outcome
        )
        return found

    def _await_outcome(self, length: int) -> "Outcome | None":
        if self._awaited is not None:
            self._awaited.give_up()
        target = self._target() if self._target is not None else None
        self._awaited = Outcome(target, length, self._clock) if target is not None else None
        return self._awaited

    def _over(self, cache: "ref[Any]") -> None:
        """Count the last draft of an answer, once the draft's cache is gone."""
        last = self._rounds.pop(cache)
        if last.outcome is None:
            return
        last.outcome.give_up()
        if last.outcome.known is None:
            return
        accepted = last.outcome.held - last.start
        whole = last.ends and accepted == len(last.tokens) - 1  # the token that ends a text is never in the cache
        self._learn(last, accepted + whole, accepted + 1, last.outcome.known)

    def _learn(self, last: _Round, accepted: int, committed: int, known: float) -> None:
        rollback_s = 0.0
        if last.outcome is not None and last.outcome.known is not None:
            known, rollback_s = last.outcome.known, last.outcome.rollback_s
        verify_s = known - last.ended
        self.stats.add_round(len(last.tokens), accepted, committed, (last.draft_s, verify_s, rollback_s))
        if isinstance(self._schedule, ConfidentLength):
            self._schedule.compare(last.sure, accepted)
        self._schedule.learn(
            drafted=len(last.tokens),
            accepted=accepted,
            draft_s=last.draft_s * len(last.tokens) / last.forwards,
            target_s=verify_s + rollback_s,
            first=last.first,
        )

    def _is_plain(self, kwargs: dict[str, Any]) -> bool:
        """Whether the prompt is token ids only, none of them masked."""
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
        most: int,
        *,
        input_ids: torch.Tensor,
        generation_config: Any,
        logits_processor: Sequence[Any] | None = None,
        **more: Any,
    ) -> tuple[GenerateDecoderOnlyOutput, list[int], list[float], int]:
        ids: Any = input_ids
        scores: list[torch.Tensor] = []
        chances: list[torch.Tensor] = []
        processors = LogitsProcessorList(logits_processor or ())
        cache = cache_in(more)
        if cache is None:
            cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
            cache.activate_past_recording()  # type: ignore[no-untyped-call]  # refused candidates are cropped
        held, start = cache.get_seq_length(), input_ids.shape[1]
        schedule, reads = self._schedule, self._host_reads
        goes_on = schedule.goes_on if isinstance(schedule, ConfidentLength) else None
        count = most if goes_on else schedule.length(most)
        tokens: list[int] = []
        sure: list[float] = []
        end, looked = None, self._clock()
        while end is None and len(scores) < count:
            output = run_model(self._model, ids[:, held:], cache)
            cache, held = getattr(output, CACHE), ids.shape[1]
            score = processors(ids, output.logits[:, -1].float())
            likely = score.softmax(-1)
            token = likely.multinomial(1) if generation_config.do_sample else score.argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], 1)
            scores.append(score)
            chances.append(likely.gather(1, token))
            passes = len(scores) - len(tokens)
            if passes < reads.every and len(scores) < count:
                continue
            launched = self._clock()
            sure += torch.cat(chances[-passes:], 1)[0].tolist()  # the device is waited for here
            tokens += ids[0, -passes:].tolist()
            began, looked = looked, self._clock()
            reads.learn(passes=passes, launch_s=launched - began, wait_s=looked - launched)
            end = _end(tokens, sure, generation_config)
            if goes_on and not goes_on(sure):
                break
        end = end or len(tokens)
        found = GenerateDecoderOnlyOutput(
            sequences=ids[:, : start + end],
            scores=tuple(scores[:end]),  # type: ignore[arg-type]
            **{CACHE: cache},
        )
        return found, tokens[:end], sure[:end], len(tokens)


def _cut(found: Any, ids: torch.Tensor, tokens: list[int], config: Any) -> list[int]:
    """End a draft before a token that would complete a stop string; returns its tokens.

    transformers needs one token at least: in place of such a one it gets one that is surely none.
    """
    before = before_end(ids, tokens)
    if before == len(tokens):
        return tokens
    kept, scores = tokens[:before], found.scores[:before]
    if not kept:
        kept = [harmless_token(ids, sorted(end_tokens(config.eos_token_id)))]
        scores = (torch.full_like(found.scores[0], -torch.inf),)
        scores[0][:, kept[0]] = 0.0  # so that it is accepted as often as the target says it
    found.sequences = torch.cat([ids, ids.new_tensor([kept])], 1)
    found.scores = scores
    return kept


def _cover(kwargs: dict[str, Any], ids: torch.Tensor) -> None:
    """Make arguments for each token that are those of the prompt cover the target's first token, too."""
    kwargs.pop("position_ids", None)  # follow from the mask
    for name in ("attention_mask", "token_type_ids"):
        if isinstance(found := kwargs.get(name), torch.Tensor) and found.ndim == 2:
            last = found[:, -1:] if name == "token_type_ids" else torch.ones_like(found[:, -1:])
            kwargs[name] = torch.cat([found, last.expand(-1, ids.shape[1] - found.shape[1])], 1)


def _end(tokens: list[int], sure: list[float], config: Any) -> int | None:
    """The number of drafted tokens up to an end of text, or up to one below the threshold; None without either."""
    ends, threshold = end_tokens(config.eos_token_id), config.assistant_confidence_threshold or 0.0
    pairs = enumerate(zip(tokens, sure, strict=True), 1)
    return next((count for count, (token, each) in pairs if token in ends or each < threshold), None)


class HostReads:
    """Reads each token where that is cheap compared to a pass, else only every few.

    A device that the host has waited for is idle until the next pass is launched: for a launch at most, and for the
    wait at most, by which the device was behind. Where there is nothing to wait for, as on a CPU, a read costs
    nothing.
    """

    def __init__(self) -> None:
        self._idle_s, self._pass_s = 0.0, 0.0

    @property
    def every(self) -> int:
        """Passes from one read to the next."""
        return _SELDOM if self._idle_s > _EXPENSIVE * self._pass_s else 1

    def learn(self, *, passes: int, launch_s: float, wait_s: float) -> None:
        """Learn from a read.

        Args:
            passes: Since the last read.
            launch_s: Seconds until all of them were launched.
            wait_s: Seconds from then until their tokens were on the host.
        """
        self._idle_s = _FADE * self._idle_s + min(launch_s / passes, wait_s)
        self._pass_s = _FADE * self._pass_s + (launch_s + wait_s) / passes


class Outcome:
    """Waits for the forward of a target that verifies a draft, and for the crop after it.

    `generate()` crops the K/V of rejected tokens as soon as the host knows them. Afterwards neither the model nor its
    cache refers to this object.

    Args:
        target: The model that verifies the draft.
        length: Tokens up to the end of the draft; the forward that reaches it is the one.
        clock: Seconds.
    """

    leaves_kv_alone = True  # read by the fingerprint of models

    def __init__(self, target: PreTrainedModel, length: int, clock: Callable[[], float]) -> None:
        self.known: float | None = None  # when the rejected tokens were known
        self.rollback_s = 0.0  # of the crop
        self.held = 0  # tokens in the cache after it
        self._length, self._clock = length, clock
        self._cache: Callable[[], Any] = lambda: None
        self._handle = own_hook(target.register_forward_hook, self._after)

    def give_up(self) -> None:
        """Stop waiting."""
        self._handle.remove()
        if (cache := self._cache()) is not None:
            vars(cache).pop("crop", None)

    def _after(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        cache = getattr(output, CACHE)
        if cache is not None and cache.get_seq_length() == self._length:
            self._handle.remove()
            self._cache = ref(cache)
            cache.crop = self._crop

    def _crop(self, tokens_to_remove: int) -> None:
        cache = self._cache()
        del cache.crop  # on the instance
        self.known = self._clock()
        cache.crop(tokens_to_remove)
        self.rollback_s = self._clock() - self.known
        self.held = cache.get_seq_length()
