"""The table of what kvboost's names are here is true, complete, and on its page."""

import copy
import importlib
import inspect
import pickle
import re
import runpy
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import kvboost_hf
from kvboost_hf.config import DraftTreeConfig, StreamingConfig
from tests.internals.cli import main
from tests.internals.engine import EngineSettings
from tests.internals.migration import ADAPTED, TABLE, Replacement, missing, refuse

pytestmark = pytest.mark.daily

ROOT = Path(__file__).parents[2]
ENTRIES = [entry for entries in TABLE.values() for entry in entries]

# What kvboost 0.9.0 has, taken down by hand.
EXPORTED = """
KVBoost GenerationMode GenerationResult RecomputeStrategy CPUPagedEngine BlockAllocator paged_attention_fwd
ChunkBlockMapper install_flash_attention uninstall_flash_attention install_paged_attention uninstall_paged_attention
flash_attention_available get_flash_attn_tier CachedChunk AssembledPrompt WarmResult KVCacheManager ChunkRegistry
ChunkStrategy PromptAssembler AssemblyMode SelectiveRecompute CacheBlendRecompute SUPPORTED_ARCHITECTURES
UNSUPPORTED_ARCHITECTURES check_model_compatibility quantize_kv dequantize_kv QuantizedKV content_hash_from_tokens
chained_hash DiskTier find_common_chunk_prefix broadcast_kv group_by_prefix default_device
StreamingConfig StreamingCausalLM load_streaming_model SpeculativeConfig TreeSpeculativeConfig SpeculativeStats
"""
CONSTRUCTOR = """
model tokenizer max_cache_bytes chunk_size max_chunks recency_window_chunks recompute_overlap recompute_strategy
recompute_ratio kv_cache_bits disk_cache_dir device chunk_boundary_window overlap_k sink_tokens prefill_chunk_size
speculative_config tree_speculative_config cost_coefficients model_name strict streaming_config awq_path
"""
GENERATE = """
prompt max_new_tokens mode temperature do_sample cacheable_prefix_len on_token prefill_chunk_size kv_cache_bits
"""
RESULTS = """
mode prompt output_text generated_tokens ttft_ms total_ms tokens_per_sec kv_reuse_ratio prompt_tokens cached_tokens
first_token_logits chunks_stored token_count chunk_size chunk_boundary_aligned partial_tail_tokens alignment_warning
"""
STREAMING = """
residency_mode keep_first_k keep_last_k n_staging_slots auto_slots_margin_gb auto_slots_max enable_double_buffering
enable_async_prefetch transfer_stream_priority use_pinned_memory enable_pinned_lru quant_kernel fuse_gate_up
prefetch_layers_ahead streaming_disable_below_layers verify_layer_shapes enable_nvtx verbose_scheduler
speculative_decode paged_kv_cache max_pinned_host_memory_gb
"""
SPECULATION = """
draft_model_id draft_streaming_config draft_device draft_k mode temperature enable_kv_rollback max_branching max_depth
node_budget cold_accept ewma_alpha verify_extra_per_node policy
"""
FLAGS = """
model gguf-file model-name device dtype backend quantization use-slow-tokenizer max-memory max-cache-bytes chunk-size
recompute-strategy kv-cache-bits sink-tokens overlap-k prefill-chunk-size block-size num-blocks awq-streaming
streaming-mode keep-first-k keep-last-k streaming-quant-kernel speculative-draft-model speculative-gamma
speculative-mode speculative-temperature speculative-tree speculative-mode-policy speculative-tree-max-branching
speculative-tree-max-depth speculative-tree-node-budget speculative-tree-cold-accept host port workers batch-window-ms
max-batch-size max-queue-size release-cache-after-request oom-planning no-oom-planning auto-truncate
planner-safety-margin max-tokens enable-auto-tool-choice tool-call-parser warm always-warm log-level
"""
METHODS = """
from_pretrained reset_cache set_cost_coefficients generate generate_batch generate_many warm cache_stats
speculative_stats streaming_stats verify_correctness
"""


def names(section: str) -> list[str]:
    return [name for entry in TABLE[section] for name in entry.names]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("names", EXPORTED.split()),
        ("KVBoost", CONSTRUCTOR.split()),
        ("generate", GENERATE.split()),
        ("results", RESULTS.split()),
        ("StreamingConfig", STREAMING.split()),
        ("speculation", SPECULATION.split()),
        ("server flags", [f"--{flag}" for flag in FLAGS.split()]),
        ("methods", [f"KVBoost.{method}" for method in METHODS.split()]),
    ],
)
def test_nothing_is_left_out(section: str, expected: list[str]) -> None:
    assert set(expected) <= set(names(section))
    assert len(names(section)) == len(set(names(section)))


@pytest.mark.parametrize("name", sorted({name for entry in ENTRIES for name in entry.ours}))
def test_what_is_ours_can_be_imported(name: str) -> None:
    assert resolved(name) is not None


def test_a_name_that_is_not_there_would_be_noticed() -> None:
    with pytest.raises(AttributeError):
        resolved("kvboost_hf.ChunkStore.wram")


def resolved(name: str) -> object:
    package, *path = name.split(".")
    return reduce(getattr, path, importlib.import_module(package))


def test_every_entry_says_something() -> None:
    assert all(entry.ours or entry.note for entry in ENTRIES)
    assert all(entry.note.endswith(".") for entry in ENTRIES if entry.note)


def test_arguments_of_calls_are_taken_or_refused() -> None:
    taken = {*EngineSettings.__dataclass_fields__, *inspect.signature(kvboost_hf.KVBoost).parameters}
    taken |= {*inspect.signature(kvboost_hf.KVBoost.from_pretrained).parameters, "model_name"}
    for entry in TABLE["KVBoost"]:
        for name in entry.names:
            assert (name in taken) != entry.refused, name
    taken = {*inspect.signature(kvboost_hf.KVBoost.generate).parameters, "prefill_chunk_size"}
    for entry in TABLE["generate"]:
        for name in entry.names:
            assert (name in taken) != entry.refused, name


def test_flags_of_the_server_are_taken_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    taken = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    for entry in TABLE["server flags"]:
        for flag in entry.names:
            assert (flag in taken) != entry.refused, flag
            if entry.refused:
                for value in ([], ["1"]):
                    with pytest.raises(SystemExit, match="2"):
                        main(["serve", flag, *value])
                    assert f"`{flag}` must be left out. {entry.text}" in capsys.readouterr().err


@pytest.mark.parametrize("section", ["KVBoost", "generate"])
def test_what_is_refused_says_what_to_do(section: str) -> None:
    for entry in TABLE[section]:
        for name in entry.names:
            if entry.refused:
                with pytest.raises(ValueError, match=f"`{name}` must be left out. {re.escape(entry.note)}"):
                    refuse(section, ["top_p", name])
            else:
                refuse(section, [name])


def test_names_that_are_gone_name_what_took_their_place() -> None:
    for entry in TABLE["names"]:
        for name in entry.names:
            if name not in kvboost_hf.__all__ and name not in ADAPTED:
                with pytest.raises(ImportError, match=re.escape(f"`{name}`. {entry.note}"[:60])) as found:
                    exec(f"from kvboost_hf import {name}")
                assert all(ours in str(found.value) for ours in entry.ours)
            else:
                exec(f"from kvboost_hf import {name}")
    with pytest.raises(AttributeError, match=r"kvboost_hf has no `nothing_of_the_kind`\.$"):
        kvboost_hf.nothing_of_the_kind  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nothing_of_the_kind'"):
        from kvboost_hf import nothing_of_the_kind  # type: ignore[attr-defined]  # noqa: F401
    assert missing("KVBoost.set_cost_coefficients") == "kvboost_hf has no `KVBoost.set_cost_coefficients`. " + (
        "Nothing to set: times are measured."
    )


# As the documents that this package follows have them, with its name.
@pytest.mark.parametrize(
    "typed",
    [
        "from kvboost_hf.streaming import StreamingConfig",
        "from kvboost_hf.engine import InferenceEngine, GenerationMode, RecomputeStrategy, GenerationResult",
        "from kvboost_hf.compat import check_model_compatibility",
    ],
)
def test_modules_have_the_names_that_kvboost_has_there(typed: str) -> None:
    found: dict[str, object] = {}
    exec(typed, found)
    assert all(getattr(kvboost_hf, name) is value for name, value in found.items() if name != "__builtins__")


def test_modules_that_are_gone_name_what_took_their_place() -> None:
    for entry in TABLE["modules"]:
        for module in entry.names:
            ours = module.replace("kvboost.", "kvboost_hf.")
            if not entry.ours:
                importlib.import_module(ours)
                continue
            with pytest.raises(ModuleNotFoundError, match=re.escape(f"no module {ours}. {entry.text}")):
                importlib.import_module(ours)
    for typed in ("from kvboost_hf import prompt_assembler", "kvboost_hf.prompt_assembler"):
        with pytest.raises(ImportError, match=r"no module kvboost_hf\.prompt_assembler\. A cache puts"):
            exec(typed, {"kvboost_hf": kvboost_hf})
    with pytest.raises(ImportError, match=r"kvboost_hf\.streaming has no `load_streaming_model`\. It returns"):
        from kvboost_hf.streaming import load_streaming_model  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'kvboost_hf\.nothing'"):
        importlib.import_module("kvboost_hf.nothing")


def test_fields_of_streaming_are_taken_or_refused() -> None:
    values: dict[str, Any] = {
        "residency_mode": "partial_resident",
        "keep_first_k": 9,
        "keep_last_k": 9,
        "quant_kernel": "auto",
    }
    for entry in TABLE["StreamingConfig"]:
        for name in entry.names:
            if entry.refused:
                with pytest.raises(ValueError, match=f"`{name}` must be left out. {re.escape(entry.text)}"):
                    StreamingConfig(**{name: values.get(name, 1)})
            else:
                StreamingConfig(**{name: values.get(name, 2)})
    config = StreamingConfig(keep_first_k=9, keep_last_k=9)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == replace(config) == config


def test_fields_of_drafts_have_their_names() -> None:
    fields = {name.rpartition(".")[2] for entry in TABLE["speculation"] for name in entry.ours if "Tree" in name}
    assert fields <= set(DraftTreeConfig.__dataclass_fields__)


def test_the_page_is_what_the_table_says() -> None:
    written = ROOT / "docs" / "migrating-from-kvboost.md"
    page = runpy.run_path(str(ROOT / "docs" / "migration.py"))["page"]()
    assert written.read_text(encoding="utf-8") == page, f"run python docs/migration.py > {written}"
    assert Replacement("a, b", "c.").names == ("a", "b")
