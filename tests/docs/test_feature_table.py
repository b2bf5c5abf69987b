"""The README's table of features: each row has tests, and its names and numbers are those of the code."""

import re
from pathlib import Path

import pytest

import kvboost_hf

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")

# What a row begins with, and where it is shown to be true.
SHOWN = {
    "Exact reuse": "parity/test_architectures.py",
    "`generate()`: greedy": "parity/test_generate.py",
    "Compiled decoding": "parity/test_compiled.py parity/test_static.py",
    "Batches, left padding": "parity/test_generate.py parity/test_edges.py",
    "Chats": "parity/test_generate.py",
    "Pipelines": "parity/test_attach.py",
    "Bare `model(...)`": "parity/test_forward.py",
    "Weights changed": "parity/test_changed_weights.py property/test_store.py",
    "Training mode": "unit/test_bad_input.py parity/test_forward.py",
    "Images, sound and video": "parity/test_multimodal.py",
    "Length-dependent rotary": "parity/test_rope_regimes.py",
    "PEFT adapters": "parity/test_adapters.py parity/test_offloaded.py parity/test_quantized.py",
    "A share of prompts computed twice": "parity/test_audit.py",
    "`verify_correctness`": "parity/test_verify.py",
    "`cache.fork()`": "parity/test_edges.py",
    "Moved chunks": "parity/test_blend.py parity/test_rotation.py property/test_blend_state.py",
    "`ContentChunker`": "unit/test_cutting.py unit/test_warm.py",
    "Tiers": "parity/test_tiers.py parity/test_tier_faults.py property/test_tier_state.py unit/test_remote_tiers.py",
    "Stored K/V compressed": "unit/test_codecs.py property/test_codecs.py",
    "Live quantization": "parity/test_live_quant.py property/test_live_quant_state.py",
    '`attn_implementation="kvboost_fa2"`': "parity/test_kvboost_fa2.py parity/test_attention_cpu.py",
    "`kvboost-hf warm`": "unit/test_cli_tiers.py",
    "Models larger than the GPU's memory": "parity/test_streaming.py parity/test_streaming_awq.py",
    "Drafts for": "parity/test_assistants.py parity/test_lookup_assistant.py parity/test_speculation_combinations.py",
    "Trees of drafts": "parity/test_tree_decoding.py property/test_draft_trees.py",
    "An [OpenAI-compatible server]": "server/test_clients.py server/test_worker.py server/test_storm.py",
    "Many replicas": "unit/test_routing.py server/test_ray.py",
    "The [`KVBoost` façade]": "parity/test_engine.py unit/test_migration.py",
}


def _rows() -> list[str]:
    section = README.split("## What works today")[1].split("\n## ")[0]
    return [line[2:] for line in section.splitlines() if line.startswith("| ") and not line.startswith("| |")][1:]


def test_each_row_is_shown_somewhere() -> None:
    rows = _rows()
    assert [row for row in rows if sum(row.startswith(name) for name in SHOWN) != 1] == []
    assert [name for name in SHOWN if not any(row.startswith(name) for row in rows)] == []


@pytest.mark.parametrize("name", SHOWN)
def test_what_shows_it_is_there(name: str) -> None:
    for file in SHOWN[name].split():
        text = (ROOT / "tests" / file).read_text("utf-8")
        assert re.search(r"^(def test_|class Test|Test\w+ = )", text, re.MULTILINE), file


def test_the_numbers_are_those_of_the_tables() -> None:
    told = " ".join(_rows())
    table = (ROOT / "docs" / "architectures.md").read_text("utf-8")
    patterns = (r"^Yes: (\d+) classes", r"^(\d+) classes; several", r"^(\d+) classes allow it")
    (yes,), (total,), (moved,) = (re.findall(pattern, table, re.MULTILINE) for pattern in patterns)
    assert f"{yes} of the {total} architectures tried" in told
    assert f"for {moved} of those architectures" in told


def test_names_are_public() -> None:
    """What is written like a call of ours, or like one of our classes."""
    told = " ".join(_rows())
    ours = set(re.findall(r"`([A-Z]\w+)[`(]", told)) | {
        "load_streamed",
        "load_assistant",
        "lookup_assistant",
        "attach",
    }
    assert len(ours) >= 8
    assert [name for name in ours if not hasattr(kvboost_hf, name)] == []
