"""`verify_correctness`: serves the same prompts by each arm, and compares the answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import UnionType
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.codecs import LiveQuant, make_codec
from kvboost_hf.cache.identity import ModelState
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.choices import CHOSEN_VERIFY_ARMS
from kvboost_hf.compat import require_cache, tolerance
from kvboost_hf.config import KVQuantConfig, ReusePolicy
from kvboost_hf.verify.arms import (
    EXACT,
    FULL,
    NAIVE,
    Coding,
    ComparedArm,
    checked_policies,
    coded_arms,
    named_policies,
)
from kvboost_hf.verify.measure import Call, WatchedCodec, answer, answer_from_codes, compare, report_of
from kvboost_hf.verify.report import CorrectnessReport
from kvboost_hf.verify.results import ArmResult, PromptResult

MakeStore = Callable[[PreTrainedModel], ChunkStore]
CallsDone = Callable[[int, int], None]  # generate() calls done, and to do
_Served = tuple[Call, ReuseReport, int]  # the last: tokens of the prompt that were read as codes
_Serve = Callable[[torch.Tensor], _Served]
GivenPrompt = str | Sequence[int] | torch.Tensor


def verify_correctness(
    model: PreTrainedModel,
    prompts: Sequence[GivenPrompt] | torch.Tensor,
    *,
    tokenizer: Any = None,
    documents: Sequence[GivenPrompt] | None = None,
    policies: Sequence[ReusePolicy] | None = None,
    codecs: Sequence[str | KVQuantConfig] = (),
    live_quants: Sequence[LiveQuant] = (),
    max_new_tokens: int = 32,
    max_kl: float = 0.01,
    min_agreement: float = 0.99,
    make_store: MakeStore = ChunkStore,
    progress: CallsDone | None = None,
) -> CorrectnessReport:
    """Measure what reuse does to a model's answers, on prompts of your own.

    The prompts are served in their order, as a service would see them: later ones reuse what earlier ones have stored.
    Each arm serves all of them, greedily, with a store of its own, and is compared with plain `generate()` in tokens
    and logits:

    - `full`: plain `generate()`;
    - `exact`: `ReusePolicy()` and K/V as it is, whose answers must be the same;
    - `naive`: chunks are moved and nothing is repaired;
    - each of `policies`. If these are the default ones, they are left out where `naive` has moved nothing;
    - each of `codecs` and of `live_quants`, and each pair of them. Each prompt is stored first, and then answered
      with a cache that holds nothing: all K/V but that of its last token comes out of the store, through the codec.

    The logits of the plain answers are kept in host memory: prompts x new tokens x vocabulary x 4 bytes.

    Args:
        model: A causal language model in eval mode, not attached.
        prompts: Texts, which need `tokenizer`, or token ids (lists, or tensors [n] or [1, n]).
        tokenizer: Tokenizes texts with its special tokens, as it would a prompt; it adds no chat template.
        documents: Texts or ids that prompts are made of. Policies that move chunks are measured a second time with
            these stored first, each computed alone (`store.warm(documents=…)`); other K/V is computed in the context
            of an earlier prompt. Computing them counts as no prompt's tokens.
        policies: Policies with mode `"blend"` to measure; None takes the default of that mode, the same with
            `progressive=False`, and those with `repair="none"` and `repair="selective"`.
        codecs: Codecs of stored K/V to judge by the thresholds, as `ChunkStore(codec=...)` takes them. That of the
            stores that `make_store` makes is always one of them, if it is lossy.
        live_quants: The same for K/V in use, as `ChunkReuseCache(live_quant=...)` takes them.
        max_new_tokens: New tokens for each prompt.
        max_kl: The highest mean KL divergence from plain `generate()`, in nats, of a policy to recommend, and of K/V
            in fewer bits.
        min_agreement: The lowest share of steps with the same most likely token, likewise.
        make_store: Makes each arm's store: `lambda model: ChunkStore(model, chunk_size=64)`.
        progress: Called after each `generate()` call with how many are done and how many there will be.

    Returns:
        The report: true if exact reuse is right, and all codecs are within the thresholds; printed, a table and a
        verdict. `report.recommended` is the policy that computes the fewest tokens within the thresholds, and
        `ReusePolicy()` where exact reuse is best, or where fewer than 8 prompts had anything that could be moved.

    Raises:
        ValueError: for no prompts, an invalid prompt, a text without a tokenizer, policies without mode `"blend"`,
            codecs that are unknown or lossless, thresholds or counts out of range, a model that cannot be served, is
            in training mode or is attached.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> document = "Anna lives in Oslo. She plays the piano. The lamp is red. It costs ten coins. " * 8
        >>> report = verify_correctness(
        ...     model, [document + "Where does Anna live?", document + "What colour is the lamp?"], tokenizer=tokenizer
        ... )
        >>> bool(report), report.exact.diverged
        (True, 0)
    """
    require_plain(model)
    _require_between("max_new_tokens", max_new_tokens, 1, None, integer=True)
    _require_between("max_kl", max_kl, 0, None)
    _require_between("min_agreement", min_agreement, 0, 1)
    chosen = named_policies(CHOSEN_VERIFY_ARMS) if policies is None else checked_policies(policies)
    service = _Service(model, as_ids(prompts, tokenizer), max_new_tokens, make_store, documents, tokenizer, progress)
    coded = coded_arms(codecs, live_quants, make_store(model).codec)
    naive = [replace(NAIVE, warmed=warmed) for warmed in ((False, True) if documents else (False,))]
    service.expect(2 + len(naive) * (1 + len(chosen)) + len(coded))
    results = [service.serve(arm) for arm in (FULL, EXACT, *naive)]
    if policies is not None or any(result.moved_tokens for result in results):
        results += [service.serve(ComparedArm(policy, arm.warmed)) for arm in naive for policy in chosen]
    results += [service.serve(arm) for arm in coded]
    return CorrectnessReport(
        model=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        tolerance=tolerance(model.dtype),
        max_kl=max_kl,
        min_agreement=min_agreement,
        arms=tuple(results),
    )


class _Service:
    """Serves all prompts by one arm after the other; the first one must be plain generate()."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[torch.Tensor],
        max_new_tokens: int,
        make_store: MakeStore,
        documents: Sequence[GivenPrompt] | None,
        tokenizer: Any,
        progress: CallsDone | None,
    ) -> None:
        self._model, self._prompts, self._max_new_tokens = model, prompts, max_new_tokens
        self._make_store, self._documents, self._tokenizer = make_store, documents, tokenizer
        self._progress = progress
        self._plain: list[Call] = []
        self._done = self._total = 0

    def expect(self, num_arms: int) -> None:
        """Say how many arms there will be."""
        self._total = num_arms * len(self._prompts)

    def serve(self, arm: ComparedArm) -> ArmResult:
        """All prompts by one arm."""
        one = self._plainly if arm.policy is None else self._coded(arm.coding) if arm.coding else self._reused(arm)
        results: list[PromptResult] = []
        for index, ids in enumerate(self._prompts):
            found, report, coded_tokens = one(ids)
            results.append(compare(index, self._plain[index], found, report, coded_tokens))
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._total)
        return ArmResult(arm, tuple(results))

    def _plainly(self, ids: torch.Tensor) -> _Served:
        found = answer(self._model, ids, self._max_new_tokens)
        self._plain.append(found)
        return found, report_of(None, ids[0].tolist()), 0

    def _reused(self, arm: ComparedArm) -> _Serve:
        """By one cache, as a service would."""
        store = self._make_store(self._model)
        if arm.kind == "exact" and not store.codec.lossless:
            store.codec = make_codec("raw")  # nobody promises that codes are exact
        if arm.warmed:
            store.warm(documents=self._documents, tokenizer=self._tokenizer, policy=arm.policy)
        cache = ChunkReuseCache(self._model, store, arm.policy, max_cache_len=None)

        def one(ids: torch.Tensor) -> _Served:
            found = answer(self._model, ids, self._max_new_tokens, cache)
            return found, cache.report, 0

        return one

    def _coded(self, coding: Coding) -> _Serve:
        """By a cache for each prompt, which has nothing but what the store reads."""
        store = self._make_store(self._model)
        store.codec = WatchedCodec(coding.codec) if coding.codec is not None else make_codec("raw")

        def one(ids: torch.Tensor) -> _Served:
            found, cache, coded_tokens = answer_from_codes(
                self._model, store, coding.live_quant, ids, self._max_new_tokens
            )
            return found, cache.report, coded_tokens

        return one


def require_plain(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that cannot be served, is in training mode or is attached."""
    require_cache(model)
    if model.training:
        raise ValueError("`model` must be in eval mode, got one in training mode. Call model.eval() first.")
    if ModelState.of(model).attached is not None:
        raise ValueError(
            f"`model` must not be attached, got an attached {type(model).__name__}: its plain generate() reuses, too. "
            "Call detach(model) first."
        )


def _require_between(name: str, value: object, low: float, high: float | None, *, integer: bool = False) -> None:
    kind: type | UnionType = int if integer else int | float
    if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(value, kind):
        raise ValueError(f"`{name}` must be {'an int' if integer else 'a number'}, got {value!r}.")
    if not low <= value or (high is not None and value > high):
        allowed = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        raise ValueError(f"`{name}` must be {allowed}, got {value}.")


def as_ids(prompts: Sequence[GivenPrompt] | torch.Tensor, tokenizer: Any) -> list[torch.Tensor]:
    """Ids [1, n] of each prompt, on the CPU.

    Raises:
        ValueError: for no prompts, an empty one, a text without a tokenizer, and anything else that is no prompt.
    """
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence | torch.Tensor):
        raise ValueError(
            f"`prompts` must be a list of prompts, got {_shown(prompts)}. Pass a single prompt as a list of one."
        )
    if len(prompts) == 0:
        raise ValueError("`prompts` must hold at least one prompt, got none. Pass some that your users would send.")
    return [_one(index, prompt, tokenizer) for index, prompt in enumerate(prompts)]


def _one(index: int, prompt: GivenPrompt, tokenizer: Any) -> torch.Tensor:
    given = prompt
    if isinstance(given, str):
        if tokenizer is None:
            raise ValueError(
                f"`prompts[{index}]` is a text, {_shown(given)}, and there is no tokenizer. Pass "
                "`tokenizer=tokenizer`, or ids in place of texts."
            )
        given = tokenizer(given)["input_ids"]
    if isinstance(given, torch.Tensor):
        ids = given.detach().cpu()
    elif isinstance(given, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in given):
        ids = torch.tensor(given, dtype=torch.long)
    else:
        raise ValueError(f"`prompts[{index}]` must be a text or token ids, got {_shown(prompt)}. Pass a list of ints.")
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"`prompts[{index}]` must be a text, or integer ids of the shape [n] or [1, n], n > 0, got "
            f"{_shown(prompt)}. Pass the rows of a batch as prompts of their own, without padding."
        )
    return ids.long()


def _shown(given: object) -> str:
    if isinstance(given, torch.Tensor):
        return f"a tensor {list(given.shape)} of {given.dtype}"
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}…"
