"""Running a cell: a history, one call of `generate()`, and what of it went through the model."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    DraftTreeConfig,
    KVQuantConfig,
    ReusePolicy,
    ReuseReport,
    TreeDecoding,
    check_model_compatibility,
    load_assistant,
    load_streamed,
    lookup_assistant,
)
from recipes.awq import quantize_awq
from tests.composition.factors import CHAINS, TREES, Cell
from tests.conftest import left_pad, make_model, random_ids
from tests.internals.assisted import EagleHeads, branch_reason
from tests.internals.cache import REPAIRS, blend_reason
from tests.internals.compat import decoder_layers, padding_reason
from tests.internals.offload import use_backend
from tests.offload.poisoning import PoisoningBackend
from tests.speculation import Passes
from tests.streaming import FULL_STREAM, stream_except

NEW = 6  # tokens of an answer
CHUNK = 32
_DRAFTED = 4
_READ = (1, 2, 3)  # hidden states that heads read
_DOCUMENTS = [random_ids(64, seed=100 + i) for i in range(2)]
_HEADS = [random_ids(n, seed=200 + n) for n in (45, 38, 33)]
_TAILS = [random_ids(20, seed=300 + i) for i in range(3)]
_UNPACKED = ("shared_expert_gate", "q_b_proj", "kv_b_proj")  # too small, of so small models
_LIVE = {
    "int8": KVQuantConfig(method="kivi", key_bits=8, value_bits=8, group_size=16, window=16, exact_layers=0),
    "int4": KVQuantConfig(method="kivi", key_bits=4, value_bits=4, group_size=16, window=16, exact_layers=0),
}


@dataclass(slots=True)
class Done:
    """What came of a cell."""

    tokens: torch.Tensor  # [rows, prompt and answer]
    logits: torch.Tensor  # [rows, vocab_size], of the first token of the answer
    work: Passes  # of the measured call
    report: ReuseReport | None


def prompts(cell: Cell) -> list[torch.Tensor]:
    """Rows [1, n] of unequal lengths: a head, documents in an order, a tail."""
    orders = [(0, 1), (1, 0), (1, 0)]
    rows = [
        torch.cat([head, *(_DOCUMENTS[i] for i in order), tail], dim=1)
        for head, order, tail in zip(_HEADS, orders, _TAILS, strict=True)
    ]
    return rows if cell.rows == "padded" else rows[:1]


def run(cell: Cell, *, spoiled: bool = False) -> Done:
    """Answer the prompts of a cell; with `spoiled`, all K/V of its history is zeros."""
    model = model_of(cell)
    _probe(model, cell)
    with tempfile.TemporaryDirectory() as folder, _stores(model, cell, Path(folder)) as (first, second):
        with _zeroed(model) if spoiled else nullcontext():
            held = _history(model, cell, first)
        store = first if second is None else second()
        with closing(store):
            cache = held if held is not None else _cache(model, cell, store)
            given = {"past_key_values": cache} if cache is not None else {}
            work = Passes()
            with work.of(model):
                found = _generate(model, cell, prompts(cell), **given, **_assistance(model, cell, store))
    report = cache.report if cache is not None else None
    return Done(found.sequences, found.logits[0], work, report)


def reference(cell: Cell) -> Cell:
    """The cell that must say the same: plain `generate()`, or where a cell loses, the simplest that loses the same."""
    simpler = replace(cell, buffers="growing")
    # Rejection sampling takes other random numbers, and so do rows that are sampled each for itself.
    drawn = cell.decoding == "sampled" and (
        cell.assistant in CHAINS or (cell.assistant in TREES and cell.rows != "one")
    )
    # A prompt over states takes one pass, but two where weights are streamed; and where they are, the first pass has
    # drafts, too.
    # Looked-up drafts are longer there, and so take other random numbers.
    longer = drawn and cell.assistant == "lookup"
    if not longer and (cell.live == "exact" or not (cell.model == "qwen3_next" or cell.assistant in CHAINS)):
        weights = cell.weights.replace("streamed AWQ", "AWQ").replace("streamed", "resident")
        simpler = replace(simpler, weights=weights)
    # What one pass computes attends to itself exactly, though it will be codes; and first drafts are a part of the end
    # of the prompt, which "query" asks.
    if not drawn and cell.live == "exact" and cell.repair != "query":
        simpler = replace(simpler, assistant="none")
    if not cell.loses:
        return replace(simpler, reuse="none", codec="raw")
    return replace(simpler, reuse="store" if cell.reuse == "disk" else cell.reuse)


def plain(cell: Cell) -> Cell:
    """The same without anything that loses."""
    return reference(replace(cell, repair="exact", codec="raw", live="exact"))


def apart(found: Done, other: Done) -> float:
    """How far the logits of the first token are off, in the worst row: root mean square, in standard deviations."""
    off = (found.logits - other.logits).square().mean(-1).sqrt()
    return float((off / other.logits.std(-1)).max())


@cache
def done(cell: Cell) -> Done:
    """`run`, once for each cell."""
    return run(cell)


def model_of(cell: Cell) -> PreTrainedModel:
    """A tiny model of several layers, all of them streamed or none."""
    model = _model(cell.model, cell.weights)
    model.set_attn_implementation(cell.attention)
    return model


@cache
def _model(name: str, weights: str) -> PreTrainedModel:
    if not weights.endswith("AWQ"):
        model = _whole(name)
        if weights == "streamed":
            stream_except(model, ())
        return model
    with use_backend(PoisoningBackend), tempfile.TemporaryDirectory() as folder:
        quantize_awq(_whole(name), folder, group_size=32, skip=("lm_head", *_UNPACKED))
        config = replace(FULL_STREAM, quant_kernel="torch")  # exact in float32, also on a CPU
        if weights == "AWQ":
            config = replace(config, residency_mode="full_resident")
        return load_streamed(folder, config, dtype=torch.float32)


def _whole(name: str) -> PreTrainedModel:
    model = make_model(name)
    config = model.config
    config.num_hidden_layers *= 2
    config.tie_word_embeddings = False  # else some say the same whatever their K/V
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types) * 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return type(model)(config).eval()


def _generate(model: Any, cell: Cell, rows: list[torch.Tensor], **kwargs: Any) -> Any:
    torch.manual_seed(0)
    many: dict[str, Any] = {
        "samples": {"num_return_sequences": 3},
        "beams": {"num_beams": 3, "num_return_sequences": 2},
    }
    told: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, **many.get(cell.rows, {}), **kwargs}
    told |= {"do_sample": cell.decoding == "sampled", "output_logits": True, "return_dict_in_generate": True}
    return model.generate(**left_pad(*rows), **told)


def _cache(model: PreTrainedModel, cell: Cell, store: ChunkStore, *, exact: bool = False) -> ChunkReuseCache | None:
    if cell.reuse == "none":
        return None
    policy = ReusePolicy(keep_hidden_states=_READ if _has_heads(cell) else None)
    if cell.repair != "exact" and not exact:
        repair: Any = cell.repair
        # Few tokens behind each seam, so that "query" has to look.
        policy = ReusePolicy(
            mode="blend", repair=repair, seam_tokens=4, min_prefill_saving=0, sink_tokens=0, progressive=False
        )
    most = 256 if cell.buffers == "static" else None
    return ChunkReuseCache(model, store, policy, max_cache_len=most, live_quant=_LIVE.get(cell.live))


@contextmanager
def _stores(model: PreTrainedModel, cell: Cell, folder: Path) -> Iterator[Any]:
    """A store to be filled and, where it is to be another one, what makes the store to be asked."""
    codec = cell.codec
    if cell.reuse != "disk":
        yield ChunkStore(model, chunk_size=CHUNK, codec=codec), None
        return

    def make() -> ChunkStore:
        return ChunkStore(model, chunk_size=CHUNK, codec=codec, tiers=["ram:64MB", f"disk:{folder}:64MB"])

    with closing(make()) as first:
        yield first, make


def _probe(model: PreTrainedModel, cell: Cell) -> None:
    """Find out now what is found out once of a model: those forwards are not to be counted."""
    check_model_compatibility(model)
    padding_reason(model)
    branch_reason(model)
    if cell.repair != "exact":
        blend_reason(model, REPAIRS[cell.repair].measure)


def _history(model: PreTrainedModel, cell: Cell, store: ChunkStore) -> ChunkReuseCache | None:
    """Fill the store, and the cache that goes on, if one does."""
    rows = prompts(cell)
    keeps = "heads" if _has_heads(cell) else "none"
    alone = replace(cell, reuse="store", buffers="growing", assistant=keeps, rows="one", decoding="greedy")
    known = rows
    if cell.repair != "exact":
        known = [torch.cat([random_ids(CHUNK * (i + 1), seed=900 + i), each], 1) for i, each in enumerate(_DOCUMENTS)]
    answer = {} if cell.assistant == "lookup" else {"max_new_tokens": 1, "min_new_tokens": 1}
    if cell.reuse != "live" or cell.repair != "exact":
        for row in known:
            earlier = _cache(model, alone, store, exact=True)
            assert earlier is not None
            _generate(model, alone, [row], past_key_values=earlier, **answer)
            earlier.store_tails()
    held = None
    if cell.reuse == "live":
        held = _cache(model, cell, store)
        begun = [row[:, : -_TAILS[0].shape[1]] if cell.repair == "exact" else row[:, :-148] for row in rows]
        _generate(model, replace(cell, assistant="none"), begun, past_key_values=held)
    if cell.reuse == "disk":
        store.close()
    return held


def _assistance(model: PreTrainedModel, cell: Cell, store: ChunkStore) -> dict[str, Any]:
    if cell.assistant == "lookup":
        return {"assistant_model": lookup_assistant(model, store)}
    if cell.assistant == "prompt lookup":
        return {"prompt_lookup_num_tokens": _DRAFTED}
    if cell.assistant == "none":
        return {}
    if cell.assistant == "heads":
        heads = load_assistant(_heads(model), target=model)
        return {"custom_generate": TreeDecoding(heads, DraftTreeConfig(policy="tree", depth=3, width=2, branching=2))}
    draft, clock = _draft(cell), count().__next__
    if cell.assistant == "trees":
        return {"custom_generate": TreeDecoding(draft, clock=clock)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The draft has")  # as many weights: it is to be right often
        told: dict[str, Any] = {"schedule": "constant", "num_assistant_tokens": _DRAFTED, "clock": clock}
        return {"assistant_model": load_assistant(draft, target=model, **told)}


def _has_heads(cell: Cell) -> bool:
    """Whether hidden states are kept for heads."""
    return cell.assistant == "heads" and (cell.repair, cell.live, cell.buffers) == ("exact", "exact", "growing")


def _heads(model: PreTrainedModel) -> PreTrainedModel:
    """EAGLE-3 heads of the model's width, which know nothing."""
    own: Any = model.config.get_text_config()
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config: Any = LlamaConfig(vocab_size=own.vocab_size, hidden_size=own.hidden_size, num_hidden_layers=1, **sizes)
    config.eagle_aux_hidden_state_layer_ids = _READ
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return EagleHeads(config).eval()


def _draft(cell: Cell) -> PreTrainedModel:
    """The target with noise in its weights."""
    draft = _whole(cell.model)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=draws), alpha=0.02 * float(weight.std().nan_to_num()))
    return draft


class _Nothing:
    """A hook before a layer: it reads zeros."""

    leaves_kv_alone = True  # as far as the fingerprint is to know

    def before(self, layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The hook."""
        return torch.zeros_like(args[0]), *args[1:]


@contextmanager
def _zeroed(model: PreTrainedModel) -> Iterator[None]:
    """K/V of all that is computed within is zeros, whatever keeps it."""
    layers: list[Any] = decoder_layers(model)
    handles = [layer.register_forward_pre_hook(_Nothing().before) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
