"""Answers as they come: `Sampler` chooses the tokens of one from logits, `TextStream` decodes them.

`choose_rows` chooses the next token of each row of a batch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import torch
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvboost_hf.errors import KVBoostError
from kvboost_hf.server.chats.reasoning import special_ids
from kvboost_hf.server.chats.values import overlap
from kvboost_hf.server.jobs import ReasoningSpan, SamplingOptions, TokenLogprob

Choice = tuple[int, TokenLogprob | None]
_Given = TypeVar("_Given")
_Got = TypeVar("_Got")

# Logits divided by less overflow float32: what is this cold is greedy.
_MIN_TEMPERATURE = 1e-6
_SCORED = 32  # rows
# How many tokens are decoded again in front of a new one, so that it gets the space and the form it has behind them.
_CONTEXT_TOKENS = 16

# `clean_up_tokenization` takes spaces out of so many characters at most, as in "is n ' t".
_CLEANED_CHARS = 8


class Sampler:
    """Chooses the tokens of one job, with the distribution that `generate()` has for the same options.

    The order is that of transformers: the repetition penalty, then presence and frequency penalties, the bias and the
    constraint, then temperature, top-k, top-p and min-p. With a seed and on the same device, the choices equal those
    of `generate(do_sample=True)` behind `torch.manual_seed(seed)`, whatever other rows there are.

    Args:
        options: How to choose. Its constraint, if any, is told of every choice.
        prompt_ids: The token ids of the prompt, for the repetition penalty.
        ends: Tokens that may not come among the first `min_tokens`, unless the constraint leaves no other.

    Raises:
        ValueError: an option is out of range.

    Example:
        >>> sampler = Sampler(SamplingOptions(max_tokens=1), prompt_ids=[5])
        >>> sampler.choose(torch.tensor([0.0, 2.0, 1.0]))
        (1, None)
    """

    def __init__(self, options: SamplingOptions, prompt_ids: Sequence[int], ends: Collection[int] = ()) -> None:
        if options.temperature < 0:
            raise ValueError(f"`temperature` must be 0 or more, got {options.temperature}.")
        if options.logprobs is not None and options.logprobs < 0:
            raise ValueError(f"`logprobs` must be 0 or more, got {options.logprobs}.")
        self._options = options
        self._repetition: RepetitionPenaltyLogitsProcessor | None = None
        if options.repetition_penalty != 1.0:
            self._repetition = RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty))
        self._greedy = options.temperature < _MIN_TEMPERATURE
        self.warpers = LogitsProcessorList() if self._greedy else _warpers(options)  # of scores alone, not of ids
        self._penalizes = bool(options.presence_penalty or options.frequency_penalty)
        self._edits = bool(self._repetition or self._penalizes or options.logit_bias or options.constraint is not None)
        self._seen = dict.fromkeys(prompt_ids)  # a set in order
        self._seen_ids: Tensor | None = None  # [1, tokens], on the device
        self._counts: Tensor | None = None  # [vocab_size], of the tokens that were chosen
        self._bias: Tensor | None = None  # [vocab_size]
        self._ends = sorted(ends) if options.min_tokens else []
        self._end_ids: Tensor | None = None  # [ends], on the device
        self._chosen = 0  # tokens
        self._generator: torch.Generator | None = None

    @property
    def plain(self) -> bool:
        """Whether the choice is the argmax of the logits as they are, and nothing is told but the token."""
        return self._greedy and self._options.logprobs is None and not (self._edits or self._bars_ends)

    @property
    def _bars_ends(self) -> bool:
        return bool(self._ends) and self._chosen < self._options.min_tokens

    def choose(self, logits: Tensor) -> Choice:
        """Choose the next token. Waits for the device once.

        Args:
            logits: [vocab_size], floating point, on any device. Not changed.

        Returns:
            The token, and its log probability before any option if the options ask for it.

        Raises:
            ValueError: the bias names a token that the model does not have.
            KVBoostError: the constraint cannot be followed.
        """
        (chosen,) = choose_rows([self], logits[None])
        if isinstance(chosen, Exception):
            raise chosen
        return chosen

    def pick(self, logits: Tensor) -> Tensor:
        """The choice for `take`, [1 + n], float32, on the device of `logits` [vocab_size], without waiting for it."""
        # Ids stay exact: float32 has all integers up to 2**24.
        scores = logits[None].float()
        edited = self._edited(scores) if self._edits else scores
        if self._bars_ends:
            edited = self._without_ends(edited)
        token = (edited if self._greedy else self._drawn(edited)).argmax(-1)
        if self._options.logprobs is None:
            return token.float()
        logprobs = scores.log_softmax(-1)[0]
        top = logprobs.topk(min(self._options.logprobs, len(logprobs)))
        return torch.cat([token.float(), logprobs[token], top.indices.float(), top.values])

    def take(self, picked: Sequence[float]) -> Choice:
        """Note the choice that `pick` made, now on the host."""
        token = int(picked[0])
        self._chosen += 1
        if self._seen_ids is not None and token not in self._seen:
            self._seen[token] = None
            self._seen_ids = torch.cat([self._seen_ids, self._seen_ids.new_full((1, 1), token)], dim=1)
        if self._counts is not None:
            self._counts[token] += 1
        if self._options.constraint is not None:
            self._options.constraint.advance(token)
        if self._options.logprobs is None:
            return token, None
        n = (len(picked) - 2) // 2
        top = tuple(zip(map(int, picked[2 : 2 + n]), picked[2 + n :], strict=True))
        return token, TokenLogprob(token, picked[1], top)

    def _edited(self, scores: Tensor) -> Tensor:
        options, device = self._options, scores.device
        if self._repetition is not None:
            if self._seen_ids is None:
                self._seen_ids = torch.tensor([[*self._seen]], dtype=torch.long).to(device, non_blocking=True)
            scores = self._repetition(self._seen_ids, scores)
        if self._penalizes:
            if self._counts is None:
                self._counts = torch.zeros_like(scores[0])
            presence = options.presence_penalty * (self._counts > 0)
            scores = scores - presence - options.frequency_penalty * self._counts
        if options.logit_bias:
            if self._bias is None:
                self._bias = _bias(options.logit_bias, scores.shape[-1]).to(device, non_blocking=True)
            scores = scores + self._bias
        if options.constraint is not None:
            allowed: Tensor = options.constraint.allowed()
            scores = scores.masked_fill(~allowed.to(device, non_blocking=True), -torch.inf)
        return scores

    def _without_ends(self, scores: Tensor) -> Tensor:
        if self._end_ids is None:
            ends = [token for token in self._ends if token < scores.shape[-1]]
            self._end_ids = torch.tensor(ends, dtype=torch.long).to(scores.device, non_blocking=True)
        barred = scores.index_fill(-1, self._end_ids, -torch.inf)
        return torch.where((barred == -torch.inf).all(), scores, barred)

    def _drawn(self, scores: Tensor) -> Tensor:
        """Scores whose argmax is a draw: what `torch.multinomial` does, but for its checks, which wait for a GPU."""
        if self._generator is None:
            self._generator = torch.Generator(scores.device)
            if self._options.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self._options.seed)
        probabilities: Tensor = self.warpers(torch.LongTensor(), scores).softmax(-1)
        return probabilities / torch.empty_like(probabilities).exponential_(generator=self._generator)


def choose_rows(samplers: Sequence[Sampler], logits: Tensor) -> list[Choice | ValueError | KVBoostError]:
    """Choose the next token of each row of logits [rows, vocab_size]. Waits for the device once for all of them.

    Returns what `Sampler.choose` gives for each row, or the error that it raises: it is of no concern to the others.
    """
    if not samplers:
        return []
    # Plain rows are cheaper done with all others than picked out.
    picked: list[Tensor | ValueError | KVBoostError] = [logits.argmax(-1).float()]
    for sampler, row in zip(samplers, logits, strict=True):
        if not sampler.plain:
            picked.append(_tried(sampler.pick, row))
    greedy, *on_host = _to_host([pick for pick in picked if isinstance(pick, Tensor)])
    others, values = iter(picked[1:]), iter(on_host)
    chosen: list[Choice | ValueError | KVBoostError] = []
    for sampler, token in zip(samplers, greedy, strict=True):
        if sampler.plain:
            chosen.append(sampler.take([token]))
        else:
            pick = next(others)
            chosen.append(_tried(sampler.take, next(values)) if isinstance(pick, Tensor) else pick)
    return chosen


def score(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """The log probabilities of tokens, and of the `top` likeliest at each place, by logits [tokens, vocab_size]."""
    found: list[TokenLogprob] = []
    for start in range(0, len(tokens), _SCORED):  # float32 takes as much again, for a few rows at a time
        logprobs = logits[start : start + _SCORED].float().log_softmax(-1)
        ids = torch.tensor(tokens[start : start + _SCORED], device=logits.device)
        best = logprobs.topk(min(top, logprobs.shape[-1]))
        columns = zip(
            ids.tolist(),
            logprobs.gather(1, ids[:, None])[:, 0].tolist(),
            best.indices.tolist(),
            best.values.tolist(),
            strict=True,
        )
        found += [TokenLogprob(token, own, tuple(zip(*likeliest, strict=True))) for token, own, *likeliest in columns]
    return found


def _tried(function: Callable[[_Given], _Got], given: _Given) -> _Got | ValueError | KVBoostError:
    try:
        return function(given)
    except (ValueError, KVBoostError) as error:  # of this row's bias or constraint
        return error


def _to_host(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Tensors [n] as lists, by one transfer."""
    values = iter(torch.cat(list(tensors)).tolist())
    return [list(islice(values, len(tensor))) for tensor in tensors]


def _warpers(options: SamplingOptions) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if options.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p != 1:
        warpers.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        warpers.append(MinPLogitsWarper(options.min_p))
    return warpers


def _bias(of_tokens: Mapping[int, float], vocab_size: int) -> Tensor:
    """[vocab_size], on the host, where a token out of range stops nothing but its own job."""
    bias = torch.zeros(vocab_size)
    for token, value in of_tokens.items():
        if not 0 <= token < vocab_size:
            raise ValueError(f"`logit_bias` must name tokens from 0 to {vocab_size - 1}, got {token}.")
        bias[token] = value
    return bias


class TextStream:
    """The text of one answer, in pieces that stay as they are whatever comes next.

    Held back are half of a character, what may begin a stop text, and spaces that the tokenizer may still take out.
    The pieces together are `tokenizer.decode(answer, skip_special_tokens=True)`, but with the space that the answer
    has behind the text of its prompt, and up to the stop text that is complete first. Where bytes of a tokenizer with
    byte fallback do not make up a character, the characters before them stay, which `decode()` spoils.

    Each token costs the decoding of some 50 tokens at most, however long the text is, broken bytes apart.

    Args:
        tokenizer: The tokenizer of the model.
        stop: Texts that end the answer; not empty ones.
        prompt_ids: The token ids of the prompt. Special tokens at its end begin a new text.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop: Leave the stop text at the end of the text.
        reasoning: The reasoning at the beginning of the answer, in which stop texts end nothing; None for none.

    Raises:
        ValueError: a stop text is empty.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> _, tokenizer = load_embedded()
        >>> stream = TextStream(tokenizer, stop=("piano",))
        >>> text = [stream.push(token) for token in tokenizer.encode("Anna plays the piano.")]
        >>> "".join(text), stream.stopped
        ('Anna plays the ', True)
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        reasoning: ReasoningSpan | None = None,
    ) -> None:
        if "" in stop:
            raise ValueError(f"`stop` must not have empty texts, got {list(stop)!r}. Leave them out.")
        self.stop: str | None = None  # the stop text that has ended the answer
        self._tokenizer = tokenizer
        self._stops, self._include_stop = tuple(stop), include_stop
        self._skip_special_tokens = skip_special_tokens
        self._cleans_up = _cleans_up(tokenizer)
        self._held = ""  # decoded, but may begin a stop text
        self._reasoning = reasoning if stop else None  # while it may go on
        self._thinking = reasoning is not None and reasoning.opened
        self._thought = ""  # decoded, but may begin a mark of the reasoning
        self._window = self._context(prompt_ids)  # the last tokens
        # What was decoded of them for good, and how many of them that is all of.
        self._told, self._whole = self._whole_characters(self._window)

    @property
    def stopped(self) -> bool:
        """Whether a stop text has ended the answer."""
        return self.stop is not None

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Add a token; returns the text that is certain now and was not before. Empty after a stop text.

        `may_stop` says whether a stop text that is complete with this token ends the text.
        """
        if self.stopped:
            return ""
        self._window.append(token)
        text = self._text()
        sure = len(text.rstrip("\ufffd")) - (_CLEANED_CHARS if self._cleans_up else 0)
        piece = text[len(self._told) : max(sure, len(self._told))]
        self._told += piece
        if self._told == text:
            self._whole = len(self._window)
        if len(self._window) >= 2 * _CONTEXT_TOKENS and not text.endswith("\ufffd"):
            self._shorten(text)
        return self._until_stop(piece, may_stop)

    def finish(self, *, may_stop: bool = True) -> str:
        """The rest of the text: no more tokens come. See `push`."""
        if self.stopped:
            return ""
        piece = self._until_stop(self._text().removeprefix(self._told), may_stop)
        if self._reasoning is not None:
            thought, self._thought, self._reasoning = self._thought, "", None
            piece += thought if self._thinking else self._until_stop(thought, may_stop)
        rest, self._held = self._held, ""
        return piece if self.stopped else piece + rest

    def _text(self) -> str:
        text = self._decode(self._window)
        # A broken byte spoils all bytes that are in a row with it, those that were told as characters, too.
        return text if text.startswith(self._told) else self._told + self._decode(self._window[self._whole :])

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
        assert isinstance(text, str)
        return text

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The end of the prompt's last text, from a whole character on."""
        special = special_ids(self._tokenizer)
        context: list[int] = []
        for token in reversed(prompt_ids[-_CONTEXT_TOKENS:]):
            if token in special:
                break
            context.insert(0, token)
        if len(context) == _CONTEXT_TOKENS:  # may begin in a character
            starts = (context[n:] for n in range(4))
            return next((ids for ids in starts if self._whole_characters(ids)[0][:1] not in ("", "\ufffd")), context)
        return context

    def _whole_characters(self, ids: list[int]) -> tuple[str, int]:
        """The text of tokens, without half a character at their end, and how many of them it is the text of."""
        for count in range(len(ids), max(len(ids) - 4, -1), -1):  # a character has four bytes at most
            text = self._decode(ids[:count])
            if not text.endswith("\ufffd"):
                return text, count
        return self._decode(ids).rstrip("\ufffd"), len(ids)

    def _shorten(self, text: str) -> None:
        """Forget the first tokens of the window, if `text`, which is all of it, ends with what the others say."""
        last = len(self._window) - _CONTEXT_TOKENS
        for start in range(last, last - _CONTEXT_TOKENS, -1):
            rest = self._decode(self._window[start:])
            if len(rest) > len(text) - len(self._told) and text.endswith(rest):
                del self._window[:start]
                self._told = self._told[len(text) - len(rest) :]
                self._whole = max(0, self._whole - start)
                return

    def _unthought(self, piece: str) -> tuple[str, str]:
        """The part of a piece that is reasoning, and what is behind it; a mark that has begun is held back."""
        marks, self._thought = self._reasoning, self._thought + piece
        assert marks is not None
        if not self._thinking:
            begun = self._thought.lstrip()
            if not begun.startswith(marks.open) and marks.open.startswith(begun):
                return "", ""
            self._thinking = begun.startswith(marks.open)
        end = self._thought.find(marks.close) if self._thinking else 0
        if end < 0:
            sure = len(self._thought) - overlap(self._thought, marks.close)
            told, self._thought = self._thought[:sure], self._thought[sure:]
            return told, ""
        end += len(marks.close) if self._thinking else 0
        told, rest = self._thought[:end], self._thought[end:]
        self._thought, self._reasoning = "", None
        return told, rest

    def _until_stop(self, piece: str, may_stop: bool) -> str:
        """`piece` behind what was held back, up to what may begin a stop text."""
        told = ""
        if self._reasoning is not None:
            told, piece = self._unthought(piece)
            if self._reasoning is not None:
                return told
        return told + self._stopped(piece, may_stop)

    def _stopped(self, piece: str, may_stop: bool) -> str:
        text, held = self._held + piece, len(self._held)
        # One that was complete while nothing might stop may be in what was held back.
        starts = {stop: text.find(stop, max(0, held - len(stop) + 1)) for stop in self._stops if may_stop}
        found = [(start + len(stop), start, stop) for stop, start in starts.items() if start >= 0]
        if found:
            end, start, self.stop = min(found)
            self._held = ""
            return text[: end if self._include_stop else start]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `decode()` takes spaces out; it does not for BPE, whatever the setting is."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return bool(tokenizer.clean_up_tokenization_spaces) and not isinstance(getattr(backend, "model", None), BPE)
