"""Maps names, arguments and flags of the kvboost package to those of this one; docs/migration.py writes its page."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["ADAPTED", "TABLE", "OldModules", "Replacement", "missing", "old_name", "refuse"]


@dataclass(frozen=True, slots=True)
class Replacement:
    """A name of the kvboost package, and its replacement in this one."""

    theirs: str  # the name in kvboost; several are separated by commas
    note: str  # what to know: how it differs, what to do in its place, or why there is nothing in its place
    ours: tuple[str, ...] = ()  # importable names that do its work; none where there is nothing
    refused: bool = False  # whether it raises, as an argument

    @property
    def names(self) -> tuple[str, ...]:
        """Each of `theirs`."""
        return tuple(self.theirs.split(", "))

    @property
    def text(self) -> str:
        """The note for an error message."""
        return f"{self.note} See {', '.join(self.ours)}." if self.ours else self.note


_PACKAGE = "kvboost_hf."


def _same(theirs: str, ours: str, note: str = "") -> Replacement:
    return Replacement(theirs, note, tuple(_PACKAGE + name for name in ours.split(", ")))


def _works(theirs: str, note: str = "The same.") -> Replacement:
    return Replacement(theirs, note)


def _gone(theirs: str, note: str, ours: str = "") -> Replacement:
    return Replacement(theirs, note, tuple(_PACKAGE + name for name in ours.split(", ") if ours), refused=True)


TABLE: Mapping[str, tuple[Replacement, ...]] = {
    "names": (
        _same("KVBoost, InferenceEngine", "KVBoost", "Both names. Made of the parts below, which can be used alone."),
        _same("GenerationMode", "GenerationMode", "`CHUNK_KV_REUSE` is exact without a `recompute_strategy`."),
        _same("GenerationResult", "GenerationResult", "With `token_ids` and `report`, without `first_token_logits`."),
        _same(
            "RecomputeStrategy",
            "RecomputeStrategy",
            "The default is None, which gives the answers of plain `generate()`. Also `query` and `first_k`.",
        ),
        _same(
            "WarmResult",
            "WarmResult",
            "True if anything of the text can be reused; `int()` gives `chunks_stored`.",
        ),
        _same("check_model_compatibility", "check_model_compatibility", "It runs the model on a few tokens."),
        _works(
            "SUPPORTED_ARCHITECTURES, UNSUPPORTED_ARCHITECTURES",
            "Those that were tried. What a model allows is found out by running it: call `check_model_compatibility`.",
        ),
        _same("KVCacheManager", "ChunkStore", "Passed to caches, not asked by hand."),
        _works("CachedChunk", "Of `DiskTier`. Chunks of a store stay inside it; `stats()` counts them."),
        _same(
            "AssembledPrompt, PromptAssembler, AssemblyMode",
            "ChunkReuseCache, ReusePolicy.mode",
            "A cache puts the prompt together when generate() runs; `cache.report` tells of what.",
        ),
        _works(
            "SelectiveRecompute, CacheBlendRecompute",
            "Their `policy` goes to a cache or an engine, which repairs when generate() runs; `apply` says so.",
        ),
        _works("ChunkRegistry, ChunkStrategy", "Cut tokens by the chunkers of stores, which are cut by `chunk_size`."),
        _same(
            "content_hash_from_tokens, chained_hash",
            "ChunkStore",
            "Keys are made by the store, over the tokens, all that was before them, the weights and the salt.",
        ),
        _works(
            "quantize_kv, dequantize_kv, QuantizedKV",
            'The same. Stores do it themselves: ChunkStore(model, codec="int8"), or ChunkReuseCache(model, '
            "live_quant=KVQuantConfig()) for a cache in use.",
        ),
        _works("DiskTier", 'With a file for each chunk. Stores: ChunkStore(model, tiers=["disk:FOLDER:50GB"]).'),
        _works(
            "find_common_chunk_prefix, broadcast_kv, group_by_prefix",
            "The same. `KVBoost.generate_batch` and `generate_many` do it themselves, to the token; "
            "`engine.group_by_prefix` finds groups of any length.",
        ),
        Replacement("default_device", "Models stay where they are; `KVBoost.from_pretrained` takes the accelerator."),
        _same(
            "CPUPagedEngine, BlockAllocator, ChunkBlockMapper, paged_attention_fwd",
            "attention",
            "No paging on a CPU: K/V grows in place, and stored chunks are copied into it. `kvboost_fa2` reads chunks "
            "where they lie with Triton; on a CPU only the server does, for requests that begin alike.",
        ),
        _same(
            "install_flash_attention, uninstall_flash_attention, install_paged_attention, uninstall_paged_attention",
            "attention",
            "No patches: load the model with `attn_implementation='kvboost_fa2'`, or call "
            "`model.set_attn_implementation('kvboost_fa2')`.",
        ),
        _same("flash_attention_available, get_flash_attn_tier", "attention.active_tier", "Which kernels are there."),
        _same("StreamingConfig", "StreamingConfig", "See the table of its fields."),
        _same("StreamingCausalLM, load_streaming_model", "load_streamed", "It returns an ordinary model."),
        _same("SpeculativeConfig", "load_assistant", "Pass the draft to `KVBoost(assistant=...)`."),
        _same("SpeculativeEngine, TreeSpeculativeEngine, DraftModel, TargetVerifier", "load_assistant, TreeDecoding"),
        _same("SpeculativeStats", "SpeculationStats"),
        _same("TreeSpeculativeConfig", "DraftTreeConfig", "For `TreeDecoding(draft, DraftTreeConfig(...))`."),
        _same(
            "TreeShape, AcceptanceEWMA, pick_shape, ChosenMode, ModeSelector",
            "DraftTreeConfig",
            "Shapes, and whether trees or chains, follow from what was accepted and from times that were measured.",
        ),
        Replacement(
            "verify_greedy, verify_sampling, truncate_past_kv, gather_kv_columns, run_speculative_decode",
            "The assisted decoding of transformers does this; `TreeDecoding` does it for trees.",
        ),
        _same("OOMPlanner", "what_fits", "The server refuses prompts that have no room with status 400."),
    ),
    "modules": (
        _works("kvboost.engine, kvboost.streaming, kvboost.compat", "For the names above that are here, too."),
        _works(
            "kvboost.kv_quantize, kvboost.disk_tier, kvboost.batch, kvboost.cacheblend, kvboost.selective_recompute, "
            "kvboost.chunk_registry",
            "For the names above: `kvboost_hf.kv_quantize` and so on.",
        ),
        _same("kvboost.prompt_assembler", "ChunkReuseCache", "A cache puts the prompt together when generate() runs."),
        _same("kvboost.speculative", "load_assistant, TreeDecoding", "Pass a draft as `assistant` of `KVBoost`."),
        _same("kvboost.flash_attn_ext, kvboost.cpu_paged", "attention", "No patches, and no pages."),
        _same("kvboost.cache_manager, kvboost.models", "ChunkStore", "What is kept is in a store."),
    ),
    "KVBoost": (
        _works("model, tokenizer, model_name", "The same; also as `model_name_or_path`."),
        _works("device", "None leaves a model where it is; `from_pretrained` takes the accelerator."),
        _works("strict", "The same; what a model allows is found out by running it."),
        _works("chunk_size", "A multiple of 16."),
        _works("max_cache_bytes", "An int, never exceeded; may be left out for 4 GiB."),
        _works("max_chunks", "Becomes bytes, as so many uncompressed chunks take; not beside `max_cache_bytes`."),
        _works(
            "recompute_strategy",
            'None by default, which is exact; kvboost\'s default was `"selective"`. Also `"query"`, `"first_k"`.',
        ),
        _works("recompute_overlap, recompute_ratio, overlap_k"),
        _works("sink_tokens", "16 by default."),
        _works("kv_cache_bits", "16, 8, 4; `codec` has others, and `live_quant` holds K/V under way as codes, too."),
        _works("disk_cache_dir", "Up to 10 GB, found by later processes; `tiers=` for another size or place."),
        _works("chunk_boundary_window", "Cuts by content, as `ContentChunker` does: 16 by default, where 0 does not."),
        _works("prefill_chunk_size", "The most tokens of a forward; also an argument of `generate`."),
        _works("streaming_config", "Of `from_pretrained`."),
        _gone("awq_path", "Pass the folder as the name of the model, with a `streaming_config`.", "load_streamed"),
        _gone(
            "recency_window_chunks", "Chunks that are asked for least go first; keep some with `warm(text, pin=True)`."
        ),
        _gone(
            "min_deviation",
            "Repairs compute as many tokens as `recompute_ratio` says; a ReusePolicy can raise that until "
            "`min_coverage` is reached.",
            "ReusePolicy.max_recompute_ratio, ReusePolicy.min_coverage",
        ),
        _gone("speculative_config", "Pass a draft model, or its name, as `assistant`.", "load_assistant"),
        _gone("tree_speculative_config", "Pass `assistant=TreeDecoding(draft, DraftTreeConfig())`.", "TreeDecoding"),
        _gone("cost_coefficients", "What forwards and copies take is measured while they run."),
        _gone("skip_if_no_seams", "Nothing is computed again where nothing was moved."),
        _gone("block_size, num_blocks", "K/V is not paged.", "attention"),
    ),
    "methods": (
        _same("KVBoost.from_pretrained", "KVBoost.from_pretrained"),
        _same("KVBoost.generate", "KVBoost.generate", "Through the chat template, where there is one."),
        _same("KVBoost.generate_batch", "KVBoost.generate_batch", "Rows of unequal lengths are right, too."),
        _same("KVBoost.generate_many", "KVBoost.generate_many"),
        _same(
            "KVBoost.warm, KVBoost.warm_chunks", "KVBoost.warm", "`position_offset` must be 0; see ChunkStore.warm."
        ),
        _same("KVBoost.cache_stats", "KVBoost.cache_stats", "The figures of `ChunkStore.stats`."),
        _same("KVBoost.streaming_stats", "KVBoost.streaming_stats", "Of the target; None where nothing is streamed."),
        _same("KVBoost.speculative_stats", "KVBoost.speculative_stats", "None without an assistant."),
        _same("KVBoost.reset_cache", "KVBoost.reset_cache", "In all tiers."),
        _same("KVBoost.verify_correctness", "KVBoost.verify_correctness", "A report, which is true or false."),
        Replacement("KVBoost.set_cost_coefficients", "Nothing to set: times are measured."),
    ),
    "generate": (
        _works("prompt, max_new_tokens, mode, temperature, do_sample"),
        _works("prefill_chunk_size", "Goes to the `generate()` of transformers, as all other arguments do."),
        _gone("on_token", "Iterate over `stream(prompt)`.", "KVBoost.stream"),
        _gone(
            "cacheable_prefix_len",
            "A chunk is found only behind the tokens that it was computed behind; keep tenants apart by `salt`.",
            "ChunkReuseCache.salt",
        ),
        _gone("kv_cache_bits", "It is a setting of the whole engine: KVBoost(kv_cache_bits=8)."),
    ),
    "results": (
        _works(
            "mode, prompt, output_text, generated_tokens, ttft_ms, total_ms, tokens_per_sec, kv_reuse_ratio, "
            "prompt_tokens, cached_tokens"
        ),
        Replacement(
            "first_token_logits", "Call `engine.model.generate(..., output_logits=True)` with a ChunkReuseCache."
        ),
        _works(
            "chunks_stored, token_count, chunk_size, chunk_boundary_aligned, partial_tail_tokens, alignment_warning"
        ),
    ),
    "arguments of parts": (
        _works("quantize_kv: kv, bits", "The same; the result has the data type that the K/V had."),
        _works("DiskTier: cache_dir, max_chunks, slot_bytes", "The budget is `max_chunks` times `slot_bytes`."),
        _works("ChunkRegistry: chunk_size, strategy, min_chunk_tokens"),
        _gone("ChunkRegistry: boundary_window", "Pass it to a ContentChunker.", "ContentChunker"),
        _works("CacheBlendRecompute: recompute_ratio"),
        _works("CacheBlendRecompute: min_deviation", "No effect; see `ReusePolicy.min_coverage`."),
        _works("SelectiveRecompute: recompute_overlap"),
        _works("SelectiveRecompute: skip_if_no_seams", "No effect: nothing is computed again where nothing moved."),
        _works("group_by_prefix: prompts, token_ids_list, chunk_size, n_prefix_chunks"),
        _works("find_common_chunk_prefix: all_token_ids, chunk_size"),
        _same("warm: position_offset", "ChunkStore.warm", "`documents=[...]` may stand anywhere in prompts."),
    ),
    "StreamingConfig": (
        _same("residency_mode", "StreamingConfig.residency_mode", "The same four."),
        _same(
            "keep_first_k, keep_last_k",
            "StreamingConfig.keep_first_k, StreamingConfig.keep_last_k, StreamingConfig.vram_budget",
            "Without them, as many layers stay as fit.",
        ),
        _same("n_staging_slots", "StreamingConfig.n_staging_slots", "2 or more."),
        _gone(
            "auto_slots_margin_gb, auto_slots_max",
            "Pass a `vram_budget`, and what to leave free as `reserved`.",
            "StreamingConfig.vram_budget, StreamingConfig.reserved",
        ),
        _gone("use_pinned_memory", "It is called `pin_memory` here.", "StreamingConfig.pin_memory"),
        _gone(
            "max_pinned_host_memory_gb",
            "Pass `host_budget` with a unit, such as '16GB'; what is beyond goes to `disk_folder`.",
            "StreamingConfig.host_budget",
        ),
        _same("quant_kernel", "StreamingConfig.quant_kernel", "`triton`, `torch`, `auto`: others repack weights."),
        _gone(
            "enable_double_buffering, enable_async_prefetch, prefetch_layers_ahead",
            "Layers are always copied ahead; `n_staging_slots` says how far.",
        ),
        _gone("transfer_stream_priority, enable_pinned_lru, fuse_gate_up", "Not offered."),
        _gone("streaming_disable_below_layers", "Leave out the config for models that fit.", "StreamingConfig"),
        _gone("verify_layer_shapes", "Always checked.", "load_streamed"),
        _gone("enable_nvtx, verbose_scheduler", "Use the profiler of PyTorch, and `streaming_stats()`."),
        _gone("speculative_decode", "Pass a draft as `assistant` of `KVBoost`.", "load_assistant"),
        _gone("paged_kv_cache", "K/V is not paged.", "ChunkReuseCache"),
    ),
    "speculation": (
        _same(
            "draft_model_id, draft_device", "load_assistant", "A name, or a model that is loaded where you want it."
        ),
        _same("draft_streaming_config", "load_streamed", "Load the draft with it, and pass the model."),
        _same("draft_k", "load_assistant", "`num_assistant_tokens`; by default lengths follow what is accepted."),
        Replacement("mode", "As `do_sample` of each call says."),
        Replacement("temperature", "That of each call."),
        Replacement("enable_kv_rollback", "Always."),
        _same("max_branching", "DraftTreeConfig.branching"),
        _same("max_depth", "DraftTreeConfig.depth"),
        _same("node_budget", "DraftTreeConfig.max_nodes"),
        _same("policy", "DraftTreeConfig.policy"),
        Replacement("cold_accept, ewma_alpha, verify_extra_per_node", "Learned from what was accepted, and measured."),
    ),
    "server flags": (
        _works("--model, --model-name, --device, --dtype, --host, --port", "Bound to 127.0.0.1 by default."),
        _works(
            "--max-cache-bytes, --chunk-size, --recompute-strategy, --kv-cache-bits, --prefill-chunk-size",
            "As the settings of `KVBoost` of these names.",
        ),
        _works(
            "--sink-tokens, --overlap-k, --chunk-boundary-window, --recompute-ratio",
            "As the settings of `KVBoost` of these names.",
        ),
        _works(
            "--awq-streaming, --keep-first-k, --keep-last-k, --streaming-mode",
            "As `StreamingConfig`; its other settings are `--n-staging-slots`, `--disk-folder`, `--host-budget`.",
        ),
        _works(
            "--speculative-draft-model, --speculative-mode-policy, --speculative-tree-max-branching, "
            "--speculative-tree-max-depth, --speculative-tree-node-budget",
            "Drafts for a request that runs alone, as `DraftTreeConfig` has them; `flat` is `chain`.",
        ),
        _works("--speculative-gamma", "The most tokens of a chain; without a policy it asks for chains."),
        _works("--batch-window-ms, --max-batch-size, --max-queue-size", "A full queue is told with status 429."),
        _works("--warm", "Of completions; chats begin with messages: `--warm-chat FILE`."),
        _works("--oom-planning, --no-oom-planning, --planner-safety-margin", "Requests without room get status 400."),
        _works("--auto-truncate"),
        _works("--max-tokens", "Of a chat that gives no length; `--max-model-len` limits prompt and answer together."),
        _works("--log-level"),
        _gone("--always-warm", "What was warmed stays in host memory, pinned: use `--warm`."),
        _gone(
            "--release-cache-after-request",
            "PyTorch gives memory back by itself; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True on small GPUs.",
        ),
        _gone("--workers", "One thread runs the model; start more servers behind a proxy for more."),
        _gone(
            "--enable-auto-tool-choice, --tool-call-parser",
            "Tools need no flag: the format is that of the tokenizer's chat template.",
        ),
        _gone("--backend, --block-size, --num-blocks", "K/V is not paged: there is nothing to set."),
        _gone(
            "--quantization, --max-memory, --use-slow-tokenizer", "Save the model as you want it, and pass its folder."
        ),
        _gone(
            "--gguf-file",
            "GGUF files become plain weights in transformers: load one with `gguf_file=...`, save it, and pass its "
            "folder.",
        ),
        _gone("--streaming-quant-kernel", "It is chosen by itself.", "StreamingConfig.quant_kernel"),
        _gone("--speculative-mode, --speculative-temperature", "Drafts are checked as each request samples."),
        _gone("--speculative-tree", "Pass `--speculative-mode-policy tree`."),
        _gone("--speculative-tree-cold-accept", "It is learned from what is accepted."),
    ),
    "endpoints": (_works("/v1/chat/completions, /v1/completions, /v1/models, /v1/stats, /v1/warm, /health"),),
    "packages": (
        _works("kvboost", "In a clone `pip install .`; once released `pip install kvboost_hf`."),
        _works("kvboost[cuda]", "Needed for GPUs older than sm_80 only: the other kernels are compiled by Triton."),
        _works(
            "kvboost[server]",
            "In a clone `pip install '.[server]'`; once released `pip install 'kvboost_hf[server]'`.",
        ),
        _works("kvboost[streaming]", "An extra of that name, which installs nothing more."),
        _works("kvboost-server", "The same, and `kvboost-hf serve`."),
    ),
}

_HOMES = {  # modules of `kvboost_hf.migration`, and the names of the kvboost package that they have
    "kv_quantize": ("quantize_kv", "dequantize_kv", "QuantizedKV"),
    "disk_tier": ("DiskTier", "CachedChunk"),
    "batch": ("find_common_chunk_prefix", "broadcast_kv", "group_by_prefix"),
    "recompute": ("CacheBlendRecompute", "SelectiveRecompute"),
    "chunk_registry": ("ChunkRegistry", "ChunkStrategy"),
    "architectures": ("SUPPORTED_ARCHITECTURES", "UNSUPPORTED_ARCHITECTURES"),
}
ADAPTED = {name: home for home, names in _HOMES.items() for name in names}
_ALIASES = {home: home for home in _HOMES if home != "architectures"} | {
    "cacheblend": "recompute",
    "selective_recompute": "recompute",
}
_NAMES = {name: entry for entries in TABLE.values() for entry in entries for name in entry.names}
_MODULES = {name: entry for entry in TABLE["modules"] if entry.ours for name in entry.names}
_REFUSED = {
    section: {name: entry for entry in entries if entry.refused for name in entry.names}
    for section, entries in TABLE.items()
}


def refuse(section: str, given: Iterable[str]) -> None:
    """Raise for arguments that only the kvboost package has.

    Args:
        section: A section of the table, such as `"KVBoost"`, `"generate"` or `"server flags"`.
        given: Names of arguments, or flags.

    Raises:
        ValueError: for the first of them that the table refuses.

    Example:
        >>> refuse("generate", ["top_p"])
    """
    for name in given:
        if (entry := _REFUSED[section].get(name)) is not None:
            raise ValueError(f"`{name}` must be left out. {entry.text}")


def old_name(module: str, name: str) -> Any:
    """Look up a name of the kvboost package that a module does not have; for the module's `__getattr__`.

    Args:
        module: That was asked.
        name: What for.

    Returns:
        A name of the kvboost package that this one has, too, but elsewhere.

    Raises:
        ImportError: for one that it does not have, a module included: Python shows the text of no other error where
            `from kvboost_hf import ...` fails.
        AttributeError: for a name that kvboost does not have.
    """
    if name in ADAPTED:
        return getattr(import_module(f"kvboost_hf.migration.{ADAPTED[name]}"), name)
    if any(name in entry.names for entry in TABLE["names"]):
        package = sys.modules["kvboost_hf"]
        if name in package.__all__ and module != package.__name__:
            return getattr(package, name)
        raise ImportError(missing(name, module), name=module)
    OldModules.find_spec(f"{module}.{name}")
    raise AttributeError(missing(name, module), name=name)


class _Alias(Loader):
    """Loads a module of the kvboost package: the module of `kvboost_hf.migration` that has its names."""

    def __init__(self, home: str) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        names = vars(import_module(f"kvboost_hf.migration.{self._home}"))
        module = ModuleType(spec.name, names["__doc__"])
        vars(module).update({name: names[name] for name in (*names["__all__"], "__all__")})
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


class OldModules:
    """The last finder of `sys.meta_path`: finds modules of the kvboost package, or raises an error with a remedy."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module that has the names of one of the kvboost package.

        Raises:
            ModuleNotFoundError: for a module that only the kvboost package has.
        """
        package, _, module = name.partition(".")
        if package != "kvboost_hf":
            return None
        if module in _ALIASES:
            return ModuleSpec(name, _Alias(_ALIASES[module]))
        if (entry := _MODULES.get(f"kvboost.{module}")) is not None:
            raise ModuleNotFoundError(f"There is no module {name}. {entry.text}", name=name)
        return None


def missing(name: str, module: str = "kvboost_hf") -> str:
    """The message for a name that a module does not have.

    Example:
        >>> missing("default_device")[:62]
        'kvboost_hf has no `default_device`. Models stay where they are'
    """
    entry = _NAMES.get(name)
    return f"{module} has no `{name}`. {entry.text}" if entry is not None else f"{module} has no `{name}`."
