"""A server whose layers come from files, with drafts, a disk tier and a codec at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_hf.assets import EMBEDDED_DRAFT_DIR, EMBEDDED_MODEL_DIR, load_embedded
from tests.internals.cache import ComputePace
from tests.internals.cli import (
    command_line,
    draft_trees,
    engine_settings,
    load_draft,
    load_model,
    main,
    server_settings,
    streaming_config,
)
from tests.internals.offload import streaming_plan
from tests.internals.server import Finished, Job, ModelEngine, SamplingOptions, start_engine, unfound
from tests.server.test_worker import Told

TEXT = "Anna lives in Oslo. She plays the piano. The lamp is red. It costs ten coins. " * 8
QUESTIONS = ("Where does Anna live?", "What does Anna play?", "What colour is the lamp?")
NEW = 16
STREAMED = f"--model {EMBEDDED_MODEL_DIR} --device cpu --dtype float32 --awq-streaming --residency-mode full_stream"
DRAFTED = f"--speculative-draft-model {EMBEDDED_DRAFT_DIR} --speculative-mode-policy tree"


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model for which any loading pays."""
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1.0)


@contextmanager
def served(flags: str) -> Iterator[ModelEngine]:
    options = command_line().parse_args(["serve", *flags.split()])
    model, tokenizer, _ = load_model(options, streaming_config(options))
    kept, settings = engine_settings(options), server_settings(options, "reader", None)
    draft, trees = load_draft(options, model), draft_trees(options)
    engine = start_engine(model, tokenizer, settings, kept, draft=draft, draft_trees=trees)
    try:
        yield engine
    finally:
        engine.close()
        engine.store.close()


def ask(engine: ModelEngine, question: str) -> tuple[str, Finished]:
    told = Told()
    ids = engine.tokenizer(TEXT + question)["input_ids"]
    engine.submit(Job(ids=ids, options=SamplingOptions(max_tokens=NEW)), told)
    assert told.end.error is None
    return told.text, told.end


@pytest.mark.daily
@pytest.mark.parametrize(
    ("flags", "tokens"),
    [("", 4096), ("--max-model-len 900", 900), ("--max-model-len 900 --max-live-tokens 1800", 1800)],
)
def test_a_budget_has_room_for_the_requests(flags: str, tokens: int) -> None:
    options = command_line().parse_args(
        ["serve", "--model", "x", "--awq-streaming", "--vram-budget", "1GB", *flags.split()]
    )
    found = streaming_config(options)
    assert found.max_tokens == tokens
    assert found.prefill_chunk_size == (256 if flags else None)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    model, tokenizer = load_embedded(torch.float32)
    found = []
    for question in QUESTIONS:
        inputs = tokenizer(TEXT + question, return_tensors="pt", return_token_type_ids=False)
        plain: Any = model.generate
        out = plain(**inputs, max_new_tokens=NEW, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        found.append(str(tokenizer.decode(out, skip_special_tokens=True)))
    return found


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_all_at_once(codec: str, expected: list[str], tmp_path: Path) -> None:
    flags = f"{STREAMED} --disk-folder {tmp_path}/layers --n-staging-slots 3 {DRAFTED}"
    flags += f" --disk-cache-dir {tmp_path}/tier --codec {codec} --max-live-tokens 4096"
    for tier in (None, "disk"):  # at the second start all of it is on disk
        with served(flags) as engine:
            plan = streaming_plan(engine.model)
            assert plan is not None
            assert (len(plan.on_disk), plan.n_slots) == (4, 3)
            found = [ask(engine, question) for question in QUESTIONS]
            # What is computed for a request is exact with any codec, and so is what comes from a store without one.
            exact = len(QUESTIONS) if codec == "raw" else (tier is None)
            assert [text for text, _ in found][:exact] == expected[:exact]
            assert all(end.cached_tokens > 100 for _, end in found[tier is None :])
            assert tier is None or found[0][1].tiers[tier] > 100
            stats = engine.stats()
            assert stats["streaming"]["layer_calls"] > 3 * 4
            assert stats["streaming"]["bytes_copied"] > plan.streamed_bytes
            assert stats["speculation"]["accepted"] > 0
            assert stats["steps"] < sum(end.completion_tokens for _, end in found)
            assert (stats["store"]["codec"] == "raw") == (codec == "raw")


def test_what_is_warmed_with_streamed_layers_is_found(expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    flags = f"{STREAMED} --disk-folder {tmp_path}/layers --disk-cache-dir {tmp_path}/tier"
    assert main(["warm", str(tmp_path / "text"), *flags.split()]) == 0
    with served(flags) as engine:
        assert unfound(engine.model, engine.store, None, [b""]) is None
        text, end = ask(engine, QUESTIONS[0])
        assert text == expected[0]
        assert end.tiers["disk"] > 100
