"""Speculation without a draft model: proposes the continuation that the last tokens had before.

The continuation is looked up in the prompt and the answer so far, as in prompt lookup decoding (A. Saxena, 2023), and
in the text of a store. Of several places that agree, the most frequent continuation counts, token by token, as in
SuffixDecoding (Oliaro et al., 2024, https://arxiv.org/abs/2411.04975); the longer the match and the more frequent the
continuation, the longer the draft. The assistant gives each proposed token probability 1, so that rejection sampling
keeps the distribution of the model.
"""

import copy
from collections.abc import Collection, Sequence
from itertools import accumulate
from operator import mul
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from kvboost_hf.assisted.limits import Pauses, before_end, end_tokens, harmless_token
from kvboost_hf.assisted.schedule import most_tokens
from kvboost_hf.assisted.tree import ROOT, Growth, Tree
from kvboost_hf.compat import require_generates, require_one_process, weights_come_and_go
from kvboost_hf.fields import require_int
from kvboost_hf.ngrams import MAX_NGRAM, Continued, check_ngrams, longest_match, most_frequent

LOOKED_UP = 24  # tokens of a draft, at most, unless somebody says otherwise
_PER_MATCHED = 4  # tokens of a draft for each token that agrees, at most
_LEAST = 0.2  # the least chance that a draft is right up to a token, unless checking costs nothing
_LEAST_IN_VAIN = 0.02
# A token that followed in all places is wrong this often where one token agrees, and so much as often with each more:
# answers of SmolLM2 that edit code, act as an agent, extract sentences, and tell stories.
_WRONG, _FALL = 0.45, 0.6
_MEDIA_IDS = ("image_token_id", "video_token_id", "audio_token_id")  # by which processors leave room for media


class TextStore(Protocol):
    """Finds how text continued before, such as a `ChunkStore`."""

    def continued(
        self, ids: NDArray[np.int64], length: int, *, max_ngram: int, min_ngram: int, salt: str | bytes | None
    ) -> Continued:
        """At most `length` tokens that followed the longest n-gram that ends `ids`; none if nothing did."""
        ...


def lookup_assistant(
    target: PreTrainedModel,
    store: TextStore | None = None,
    *,
    num_assistant_tokens: int = LOOKED_UP,
    max_ngram: int = MAX_NGRAM,
    salt: str | bytes | None = None,
) -> PreTrainedModel:
    """Make an assistant that proposes how the last tokens went on before, in the prompt or in a store's text.

    The longer match wins; of equal ones, that in the prompt. Of its continuations the most frequent is proposed, as
    far as it is likely to be right. Without a match it proposes one token, since transformers needs one. On a CPU that
    makes the forward half as long again, so take it for answers that quote. The first token of an answer comes from
    the target alone, as with `load_assistant`.

    Args:
        target: The model that generates.
        store: Where to look besides the prompt, such as the `ChunkStore` of the target; None for the prompt alone.
        num_assistant_tokens: The most tokens to propose at once.
        max_ngram: The longest n-gram to match, from 2 to 8 tokens.
        salt: The salt of the stored prompts to search, such as `cache.salt`; None for the store's.

    Returns:
        A model without weights for the argument `assistant_model` of `generate()`.

    Raises:
        ValueError: for a `num_assistant_tokens` that is not positive, a bad `max_ngram`, a target that cannot
            generate, or a store that is none.

    Example:
        >>> from kvboost_hf import ChunkReuseCache, ChunkStore
        >>> from kvboost_hf.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> store = ChunkStore(model)
        >>> assistant = lookup_assistant(model, store)
        >>> inputs = tokenizer("The lamp is red. " * 20, return_tensors="pt")
        >>> cache = ChunkReuseCache(model, store)
        >>> out = model.generate(**inputs, cache=cache, assistant_model=assistant, max_new_tokens=8)
        >>> out.equal(model.generate(**inputs, max_new_tokens=8))
        True
    """
    require_int("num_assistant_tokens", num_assistant_tokens)
    check_ngrams(max_ngram)
    require_generates(target)
    if store is not None and not hasattr(store, "continued"):
        raise ValueError(
            f"`store` must be a ChunkStore or None, got {store!r}. Of a ChunkReuseCache pass `cache.store`."
        )
    require_one_process(target, "Text that a store looks up")
    return LookupAssistant(target, store if store is not None else _NoText(), num_assistant_tokens, max_ngram, salt)


class _NoText:
    """Finds no text."""

    def continued(self, ids: NDArray[np.int64], length: int, **_: Any) -> Continued:
        return Continued.nothing()


class LookupAssistant(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """The assistant that `lookup_assistant` makes."""

    def __init__(
        self, target: PreTrainedModel, store: TextStore, num_assistant_tokens: int, max_ngram: int, salt: Any
    ) -> None:
        config = target.config.get_text_config()
        super().__init__(PreTrainedConfig(vocab_size=config.vocab_size))  # type: ignore[call-arg]
        self.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            num_assistant_tokens=most_tokens(num_assistant_tokens, target, Pauses(None)),
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,  # scores tell nothing
        )
        self._target = (target,)  # in a tuple, for it is no part of this module
        self._store, self._max_ngram, self._salt, self.longest = store, max_ngram, salt, num_assistant_tokens
        # Passes take so long that tokens to check are free.
        self._least = _LEAST_IN_VAIN if weights_come_and_go(target) else _LEAST
        self._media = {getattr(target.config, name, None) for name in _MEDIA_IDS} - {None}

    @property
    def device(self) -> torch.device:
        """The device of the target."""
        return self._target[0].device

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, **kwargs: Any) -> GenerateDecoderOnlyOutput:
        """Propose tokens, as assisted decoding asks for them.

        Args:
            input_ids: [1, tokens].
            max_new_tokens: The most tokens to propose.
            kwargs: `generation_config`, which names the tokens that end a text; others are ignored.

        Returns:
            `sequences` [1, tokens + proposed], and of each token proposed `scores` [1, vocab_size], float32.
        """
        ids = input_ids[0].cpu().numpy()
        # The configuration is no variable: this would look like a generate() of transformers.
        ends = end_tokens(kwargs["generation_config"].eos_token_id)
        found = self.proposed(ids, max_new_tokens, ends) or [int(ids[-1])]  # transformers needs one at least
        found = found[: before_end(input_ids, found)] or [harmless_token(input_ids, ends)]
        draft = torch.tensor([found], device=input_ids.device)
        shape = (draft.shape[1], self.config.vocab_size)
        scores = torch.full(shape, -torch.inf, dtype=torch.float32, device=input_ids.device)
        scores.scatter_(1, draft.T, 0.0)
        sequences: Any = torch.cat([input_ids, draft], dim=1)
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores.split(1))  # type: ignore[no-untyped-call]

    def searching(self, store: TextStore, salt: bytes) -> "LookupAssistant":
        """The same assistant, which looks text up in another store, or under another salt."""
        twin = copy.copy(self)
        twin._store, twin._salt = store, salt
        return twin

    def proposed(self, ids: NDArray[np.int64], length: int, ends: Collection[int]) -> list[int]:
        """At most `length` tokens that may follow `ids` [tokens]; none if nothing followed their last ones before.

        As many as are right with a chance that is worth checking them, and no more than four for each token that
        agrees.
        """
        found = self.found(ids, length)
        tokens = found.tokens[: _PER_MATCHED * found.agreeing]
        chances = accumulate(probabilities(found), mul)
        return self.cut([token for token, chance in zip(tokens, chances, strict=False) if chance >= self._least], ends)

    def found(self, ids: NDArray[np.int64], length: int) -> Continued:
        """How `ids` [tokens] may go on for at most `length` tokens, by the text itself or by that of the store.

        The longer match wins; of equal ones, that in the text itself, which may go on repeating itself.
        """
        places = np.flatnonzero(ids[:-1] == ids[-1]) + 1
        places, agreeing = longest_match(ids, places, ids, self._max_ngram)
        if agreeing < self._max_ngram:
            least = max(agreeing + 1, 2)
            asked = {"max_ngram": self._max_ngram, "min_ngram": least, "salt": self._salt}
            if (stored := self._store.continued(ids[-self._max_ngram :], length, **asked)).tokens:
                return stored
        if not agreeing:
            return Continued.nothing()
        return Continued(*most_frequent(ids, places, length, repeating=True), agreeing)

    def cut(self, draft: list[int], ends: Collection[int]) -> list[int]:
        """`draft` up to the first token that ends a text, and before the first placeholder of media."""
        for i, token in enumerate(draft):
            if token in self._media:
                return draft[:i]
            if token in ends:
                return draft[: i + 1]
        return draft


def probabilities(found: Continued) -> list[float]:
    """How likely each token is to be right if those before it are: by its share, and the tokens that agree by then."""
    return [share * (1 - _WRONG * _FALL ** (found.agreeing + place - 1)) for place, share in enumerate(found.shares)]


class LookupDraft:
    """Drafts chains for one answer from what a `LookupAssistant` proposes, as `TreeDraft` does with a model.

    Args:
        assistant: Proposes tokens.
        growth: Knows how often they were accepted.
        ends: Tokens that end a text.
    """

    passes = 0  # of a draft model
    share = 0.0

    def __init__(self, assistant: LookupAssistant, growth: Growth, ends: frozenset[int]) -> None:
        self._assistant, self._growth, self._ends = assistant, growth, ends

    def behind(self, length: int) -> int:
        """As `Drafter.behind`: none, since looking up takes next to no time."""
        return 0

    def grow(self, ids: torch.Tensor, room: int, *, chain: bool = False) -> Tree:
        """The proposed tokens behind `ids` [1, tokens], at most `room`."""
        found = self._assistant.found(ids[0].cpu().numpy(), min(room, self._assistant.longest))
        tree, parent, chance = Tree(), ROOT, 1.0
        tokens = self._assistant.cut(found.tokens, self._ends)
        for token, probability in zip(tokens, probabilities(found), strict=False):
            chance *= self._growth.calibration.rate(probability)
            parent = tree.add(token, parent, chance, probability)
        return tree

    def keep(self, path: Sequence[int]) -> None:
        """Nothing: the next draft is looked up anew."""
