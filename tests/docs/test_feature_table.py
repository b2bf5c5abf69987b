"""The table of features: each row has tests, and its names and numbers are those of the code."""

import re
import warnings
from pathlib import Path

import pytest

import kvboost_hf
from tests.architectures import TRIED, make_architecture
from tests.docs.pages import PAGES, ROOT, name_of
from tests.internals.assisted import branch_reason

FEATURES = (ROOT / "docs" / "features.md").read_text("utf-8")

# What a row begins with, and where it is shown to be true. The files have the names that it gives as code; where it
# gives none, tests are named.
SHOWN = {
    "Exact reuse": "parity/test_architectures.py::test_reuse_or_a_reason",
    "`generate()`: greedy": "parity/test_generate.py",
    "Compiled decoding": "parity/test_compiled.py parity/test_static.py",
    "Batches, left padding": "parity/test_generate.py::test_left_padded_batches "
    "parity/test_generate.py::test_a_cold_row_costs_no_other_row_its_reuse",
    "Chats": "parity/test_generate.py::test_growing_chat parity/test_generate.py::test_one_cache_for_any_prompts",
    "Pipelines": "parity/test_attach.py",
    "Whatever others do": "parity/test_never_poisoned.py property/test_foreign_edits.py",
    "Bare `model(...)`": "parity/test_forward.py",
    "`output_hidden_states`": "parity/test_hidden_states.py",
    "Weights changed": "parity/test_changed_weights.py::test_between_calls property/test_store.py::TestStore "
    "parity/test_tier_faults.py::test_tenants_cannot_tell_what_others_have_asked",
    "Dropout in training mode": "unit/test_bad_input.py parity/test_forward.py",
    "Images, sound and video": "parity/test_multimodal.py::test_a_chat_about_images",
    "Length-dependent rotary": "parity/test_rope_regimes.py",
    "PEFT adapters": "parity/test_adapters.py parity/test_offloaded.py parity/test_quantized.py "
    "parity/test_compiled.py",
    "A share of prompts computed twice": "parity/test_audit.py",
    "`verify_correctness`": "parity/test_verify.py",
    "`cache.fork()`": "parity/test_edges.py",
    "Moved chunks": "parity/test_blend.py parity/test_rotation.py property/test_blend_state.py",
    "`ContentChunker`": "unit/test_cutting.py unit/test_warm.py",
    "Many rows of few prompts": "parity/test_shared_rows.py::test_a_prompt_is_computed_once_for_all_its_samples",
    "Tiers": "parity/test_tiers.py::test_a_restart_loses_nothing parity/test_tier_faults.py::test_a_full_disk "
    "unit/test_remote_tiers.py::test_a_server_that_is_killed_is_a_miss_until_it_is_back property/test_tier_state.py",
    "Stored K/V compressed": "unit/test_codecs.py property/test_codecs.py",
    "Live quantization": "parity/test_live_quant.py property/test_live_quant_state.py",
    '`attn_implementation="kvboost_fa2"`': "parity/test_kvboost_fa2.py parity/test_attention_cpu.py",
    "`kvboost-hf warm`": "unit/test_cli_tiers.py parity/test_content_names.py::test_prune",
    "Models larger than the GPU's memory": "parity/test_streaming.py parity/test_streaming_awq.py "
    "parity/test_streaming_formats.py",
    "Drafts for": "parity/test_assistants.py parity/test_lookup_assistant.py parity/test_speculation_combinations.py",
    "Drafts by heads": "parity/test_own_heads.py::test_warm_is_as_cold",
    "Trees of drafts": "parity/test_tree_decoding.py property/test_draft_trees.py",
    "An [OpenAI-compatible server]": "server/test_clients.py server/test_worker.py server/test_storm.py",
    "Many replicas": "unit/test_routing.py::test_a_prompt_goes_where_most_of_it_went "
    "server/test_ray.py::test_prompts_go_where_they_went_and_survive_a_replica",
    "The [`KVBoost` façade]": "parity/test_engine.py unit/test_migration.py",
}


def _rows() -> list[str]:
    section = FEATURES.split("## What works today")[1]
    return [line[2:] for line in section.splitlines() if line.startswith("| ") and not line.startswith("| |")][1:]


def test_each_row_is_shown_somewhere() -> None:
    rows = _rows()
    assert [row for row in rows if sum(row.startswith(name) for name in SHOWN) != 1] == []
    assert [name for name in SHOWN if not any(row.startswith(name) for row in rows)] == []


@pytest.mark.daily
@pytest.mark.parametrize("name", SHOWN)
def test_what_shows_it_is_there(name: str) -> None:
    shown = [place.partition("::")[::2] for place in SHOWN[name].split()]
    texts = {file: (ROOT / "tests" / file).read_text("utf-8") for file, _ in shown}
    for file, test in shown:
        pattern = rf"^(def {test}\(|{test} = )" if test else r"^(def test_|class Test|Test\w+ = )"
        assert re.search(pattern, texts[file], re.MULTILINE), f"{file} has no test {test}"
    (feature,) = (row.split(" | ")[0] for row in _rows() if row.startswith(name))
    named = {word for code in re.findall("`(.+?)`", feature) for word in re.findall(r"\w{4,}", code)} - {"generate"}
    assert [word for word in sorted(named) if word not in " ".join(texts.values())] == []
    assert named or any(test for _, test in shown), f"name the tests that show {name!r}"


@pytest.mark.slow
def test_the_numbers_of_architectures() -> None:
    """Those of exact reuse and of moved chunks are in the table; which compute trees is tried here."""
    table = (ROOT / "docs" / "architectures.md").read_text("utf-8")
    patterns = (r"^Yes: (\d+) classes", r"^(\d+) classes; several", r"^(\d+) classes allow it")
    (yes,), (total,), (moved,) = (re.findall(pattern, table, re.MULTILINE) for pattern in patterns)
    with warnings.catch_warnings(action="ignore"):  # what architectures warn of is theirs
        trees = sum(branch_reason(make_architecture(name)) is None for name in TRIED)
    counts = {(yes, total), (moved, total), (str(trees), str(len(TRIED)))}
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        text = page.read_text("utf-8").replace("of those architectures", f"of the {total} architectures")
        told = set(re.findall(r"(\d+)\s+of\s+(?:the\s+)?(\d+)\s+architectures", text))
        assert told <= counts, name_of(page)
        assert told == counts or page.name not in ("README.md", "features.md")


DEVICE = r"(GPUs?\b|CUDA\b|[ABHLTV]\d{1,3}\b|RTX|TPU|ROCm|AMD(?! EPYC)|MPS|Apple|Macs?\b)"
CONFIRMED = re.compile(
    rf"\b(?:confirmed|measured|tested|tried|verified|runs?|works|yes)\s+on\s+(?:\w+\s+)?{DEVICE}", re.IGNORECASE
)
DENIED = re.compile(r"\b(?:not|never|no|none|what)\b[^.;|]*$", re.IGNORECASE)


def _confirmed(text: str) -> list[str]:
    """The devices that something has run on, as a text says; not where it denies it, or asks."""
    return [found[1] for found in CONFIRMED.finditer(text) if not DENIED.search(text[: found.start()])]


@pytest.mark.daily
@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_no_device_is_claimed_that_the_status_does_not_name(page: Path) -> None:
    rows = (ROOT / "docs" / "gpu-status.md").read_text("utf-8").splitlines()
    header, _, *cells = [row.split("|")[2] for row in rows if row.startswith("| ")]
    named = f"{header}, a GPU" if any("passes" in cell for cell in cells) else ""
    assert [device for device in _confirmed(page.read_text("utf-8")) if device not in named] == []


@pytest.mark.daily
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("| yes, confirmed on H100, AMD and TPU |", ["H100"]),
        ("Not on a CPU. Tested on an RTX 3060", ["RTX"]),
        ("yes on a GPU", ["GPU"]),
        ("yes on a CPU, not yet confirmed on a GPU; run on an AMD EPYC. It has never run on CUDA.", []),
    ],
)
def test_claimed_devices_are_found(text: str, found: list[str]) -> None:
    assert _confirmed(text) == found


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
