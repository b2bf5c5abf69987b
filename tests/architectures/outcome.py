"""What reuse does for one model, found out by doing it: a row of the table of architectures."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, check_model_compatibility
from tests.conftest import as_inputs, counted, left_pad, random_ids
from tests.internals.cache import REPAIRS, blend_reason, copier, make_layers, offer_content
from tests.internals.compat import cache_argument, key_rotation

NEW = 6
# In standard deviations of the logits: what rounding explains in float32.
TOLERANCE = 2e-4
# Of keys: angles are rounded in float32, by up to half a unit of 390 radians, and text differs a little by that.
MOVED_TOLERANCE = 1e-3


def text_ids(n: int, seed: int) -> torch.Tensor:
    """Ids [1, n] that stand for text in every model: some take the last ids for images and sound."""
    ids = random_ids(n, seed)
    return torch.where(ids < 190, ids, ids - 100)


PROMPT, NEXT, OTHER = text_ids(100, seed=1), text_ids(30, seed=2), text_ids(90, seed=3)
LONGER = torch.cat([PROMPT, NEXT], dim=1)
MOVED = text_ids(320, seed=6)  # more than a layer with a window keeps
DOCUMENTS = [text_ids(48, seed=10 + i) for i in range(3)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A prompt in a row of prompts.

    Args:
        inputs: What `generate()` is given.
        fresh: Whether it comes with a new cache on the same store, not with that of the step before.
        repeats: Whether most of it was seen, so that half of it must be saved where reuse is possible.
    """

    inputs: dict[str, torch.Tensor]
    fresh: bool = False
    repeats: bool = False


STEPS = {
    "a first prompt": Step(inputs=as_inputs(PROMPT)),
    "the same through a fresh cache": Step(inputs=as_inputs(PROMPT), fresh=True, repeats=True),
    "a longer one": Step(inputs=as_inputs(LONGER), repeats=True),
    "a shorter beginning of it, and other text": Step(inputs=as_inputs(torch.cat([PROMPT[:, :70], NEXT], dim=1))),
    "an unrelated one": Step(inputs=as_inputs(OTHER)),
    "a padded batch of a known and a new row": Step(inputs=left_pad(LONGER, text_ids(60, seed=4))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the steps.

    Args:
        outcome: "exact" if K/V was reused, "bypassed" if all was computed, "refused" if there can be no cache.
        layers: Class names of the layers in the cache that plain `generate()` makes, sorted.
        reason: Why nothing was reused, or None.
        moved: Whether its K/V can be moved to other positions.
        moved_reason: Why not, or None.
    """

    outcome: Literal["exact", "bypassed", "refused"]
    layers: tuple[str, ...]
    reason: str | None
    moved: bool = False
    moved_reason: str | None = "nothing of it can be reused"


def outcome_of(model: PreTrainedModel) -> Outcome:
    """Run all steps with and without reuse.

    Raises:
        AssertionError: if an answer is not that of plain `generate()`, if work is neither saved nor is it said why
            not, or if K/V that is said to be movable is not.
    """
    first = check_context_matters(model)
    layers = layers_in(first.get("past_key_values"))
    try:
        report = check_model_compatibility(model, strict=False)  # its probes run now, so that no step pays for them
        store = ChunkStore(model, chunk_size=32)
        cache = ChunkReuseCache(model, store)
    except ValueError as error:
        refusal = without_figures(str(error))
    else:
        refusal = None
    if refusal is not None:
        assert not takes_a_cache(model, first), f"refused, although plain generate() takes a cache: {refusal}"
        return Outcome(outcome="refused", layers=layers, reason=refusal)
    told = []
    for name, step in STEPS.items():
        if step.fresh:
            cache = ChunkReuseCache(model, store)
        reason = check_step(model, name, step, cache)
        if step.repeats:
            told.append(reason)
    assert len(set(told)) == 1, f"repeated prompts are treated differently: {told}"
    if told[0] is None:
        check_moving(model)
        if report.moved:
            check_blending(model)
            check_repairing(model)
        why = None if report.moved_reason is None else without_figures(report.moved_reason)
        return Outcome(outcome="exact", layers=layers, reason=None, moved=report.moved, moved_reason=why)
    return Outcome(outcome="bypassed", layers=layers, reason=without_figures(told[0]))


def check_step(model: PreTrainedModel, name: str, step: Step, cache: ChunkReuseCache) -> str | None:
    """The reason for a bypass; fails if the answer is wrong, or if less was saved than the report claims."""
    rows, length = step.inputs["input_ids"].shape
    try:
        with counted(model) as plain_work:
            expected = generate(model, step.inputs)
    except Exception:
        assert rows > 1, f"{name}: plain generate() fails"
        return "this architecture takes no padding"  # nothing to compare with
    with counted(model) as work:
        found = generate(model, step.inputs, **{cache_argument(model): cache})
    assert_same(name, expected, found)
    report, saved = cache.report, plain_work.tokens - work.tokens
    assert report is not None, f"{name}: no report"
    if report.bypass_reason is not None:
        assert report.reused_tokens == 0, f"{name}: bypassed, yet {report.reused_tokens} tokens reused"
        assert saved <= 0, f"{name}: bypassed, yet {saved} tokens fewer were forwarded"
        return report.bypass_reason
    if rows == 1:
        assert saved == report.reused_tokens, f"{name}: the report claims {report.reused_tokens}, saved are {saved}"
    elif report.reused_tokens:
        assert saved > 0, f"{name}: the report claims {report.reused_tokens}, nothing is saved"
    if step.repeats:
        assert saved >= length // 2, f"{name}: {saved} of {length} tokens saved, and no reason given"
    return None


@torch.no_grad()
def check_moving(model: PreTrainedModel) -> None:
    """K/V that can be moved must be, moved, what plain transformers computes further on."""
    rotation, shift = key_rotation(model), 300
    if isinstance(rotation, str):
        return
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    positions = torch.arange(OTHER.shape[1]) + torch.tensor([[0], [shift]])
    model(input_ids=OTHER.expand(2, -1), position_ids=positions, past_key_values=cache, use_cache=True)
    for idx, layer in enumerate(cache.layers):
        if layer.keys is None:
            assert rotation.layers[idx] is None, f"layer {idx} has no keys, yet they rotate"
            continue
        kept = [layer.keys, layer.values]
        rotated = kept.pop(rotation.rotated(idx))
        for found, expected in ((rotation.rotate(idx, rotated[0], shift), rotated[1]), kept[0]):
            scale = expected.std()
            torch.testing.assert_close(found / scale, expected / scale, atol=MOVED_TOLERANCE, rtol=MOVED_TOLERANCE)


def check_blending(model: PreTrainedModel) -> None:
    """With K/V of the same tokens after the same history, 37 positions further on, nothing would need repair.

    Two in three chunks are moved back. Whatever computes a part of the tokens must do that rightly then.
    """
    expected = generate(model, as_inputs(MOVED), max_new_tokens=2)
    length, shift = MOVED.shape[1], 37
    for name in ("none", "query", "cacheblend"):
        store = ChunkStore(model, chunk_size=32)
        layers = make_layers(model)
        cache = Cache(layers=[layer.native for layer in layers])
        positions = torch.arange(length)[None] + shift
        with torch.no_grad():
            model(input_ids=MOVED, position_ids=positions, **{cache_argument(model): cache}, use_cache=True)
        tokens = np.concatenate([np.full(shift, 2), MOVED[0].numpy()])

        def copies(start: int, stop: int, layers: Any = layers, store: ChunkStore = store) -> Any:
            if (start - shift) // 32 % 3 == 1:
                return 0, None
            return copier(0, start - shift, stop - shift, layers, store.column_format, at_start=False)

        offer_content(store, store.root(store.salt), tokens, shift, copies)
        found, report, forwarded = blend(model, store, MOVED, name, recompute_ratio=0.2)
        assert_same(f"moved as it was, repair={name}", expected, found)
        if blend_reason(model, REPAIRS[name].measure) is not None:
            assert report.moved_reason
            continue
        assert report.moved_tokens == 32 * 7 - 16, f"repair={name}: {report.moved_tokens} tokens moved"
        if name == "none":
            assert forwarded == length - report.moved_tokens, f"{forwarded} tokens forwarded"


def check_repairing(model: PreTrainedModel) -> None:
    """Documents stored behind other text, in another order: with everything computed again it is plain generate()."""
    prompt = torch.cat([text_ids(21, seed=20), *(DOCUMENTS[i] for i in (2, 0, 1)), NEXT], dim=1)
    store = ChunkStore(model, chunk_size=16)
    cache = ChunkReuseCache(model, store)
    for i, document in enumerate(DOCUMENTS):
        text = torch.cat([text_ids(16 * i + 11, seed=30 + i), document], dim=1)
        generate(model, as_inputs(text), max_new_tokens=1, **{cache_argument(model): cache})
    cache.reset()
    found, report, _ = blend(model, store, prompt, "first_k", recompute_ratio=1.0)
    assert report.moved_tokens == report.recomputed_tokens > 64, f"{report.moved_tokens} tokens moved"
    assert_same("all repaired", generate(model, as_inputs(prompt), max_new_tokens=2), found)


def blend(
    model: PreTrainedModel, store: ChunkStore, prompt: torch.Tensor, repair: Any, *, recompute_ratio: float
) -> tuple[Any, Any, int]:
    """What `generate()` gives with moved chunks, the report, and the tokens of the prompt that were computed."""
    cache = ChunkReuseCache(
        model,
        store,
        ReusePolicy(
            mode="blend",
            repair=repair,
            recompute_ratio=recompute_ratio,
            sink_tokens=0,
            min_prefill_saving=0,
            progressive=False,
        ),
    )
    with counted(model) as work:
        found = generate(model, as_inputs(prompt), max_new_tokens=2, **{cache_argument(model): cache})
    return found, cache.report, work.tokens - 1


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    """Greedy `generate()` with logits; plain, if no cache of ours is given."""
    kwargs = {"max_new_tokens": NEW, **kwargs}
    return model.generate(**inputs, do_sample=False, output_logits=True, return_dict_in_generate=True, **kwargs)


def takes_a_cache(model: PreTrainedModel, first: Any) -> bool:
    """Whether plain `generate()` gives its usual answers, to a prompt and to a longer one, with a cache of its own."""
    try:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        found = [generate(model, as_inputs(ids), past_key_values=cache).sequences for ids in (PROMPT, LONGER)]
    except Exception:
        return False
    expected = [first.sequences, generate(model, as_inputs(LONGER)).sequences]
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and cache.get_seq_length() > 0


def assert_same(name: str, expected: Any, found: Any) -> None:
    """Same tokens, and logits as far as rounding allows."""
    unequal = f"{name}: {found.sequences[:, -NEW:].tolist()}, not {expected.sequences[:, -NEW:].tolist()}"
    assert torch.equal(expected.sequences, found.sequences), unequal
    for right, other in zip(expected.logits, found.logits, strict=True):
        scale = right.std()
        torch.testing.assert_close(
            other / scale, right / scale, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda text: f"{name}: {text}"
        )


def check_context_matters(model: PreTrainedModel) -> Any:
    """What plain `generate()` gives; fails if it says the same whatever it has read: it would pass with any K/V."""
    changed = torch.cat([random_ids(PROMPT.shape[1] - 1, seed=5), PROMPT[:, -1:]], dim=1)
    first, other = generate(model, as_inputs(PROMPT)), generate(model, as_inputs(changed))
    difference = (first.logits[0] - other.logits[0]).abs().max()
    assert difference > 10 * TOLERANCE * first.logits[0].std(), "what is read changes nothing in what is said"
    return first


@torch.no_grad()
def check_outputs(model: PreTrainedModel) -> None:
    """Fails if an argument that is taken to leave K/V alone changes what is computed."""
    expected = model(PROMPT, return_dict=True).logits
    asked: dict[str, Any] = {"output_hidden_states": True, "output_router_logits": True}
    found = model(PROMPT, return_dict=False, num_items_in_batch=2, num_logits_to_keep=1, **asked)
    logits = [part for part in found if isinstance(part, torch.Tensor) and part.shape == expected.shape]
    assert any((part - expected).abs().max() <= TOLERANCE * expected.std() for part in logits)


def layers_in(kept: Any) -> tuple[str, ...]:
    """Class names of the layers in the cache of a finished `generate()`; of the state itself if it is no Cache."""
    if isinstance(kept, EncoderDecoderCache):
        kept = kept.self_attention_cache
    if isinstance(kept, Cache):
        return tuple(sorted({type(layer).__name__ for layer in kept.layers}))
    return () if kept is None else (type(kept).__name__,)


def without_figures(reason: str) -> str:
    """A reason without what was measured, which differs by a little between machines."""
    return re.sub(r" \(by [^)]*\)", "", reason)
