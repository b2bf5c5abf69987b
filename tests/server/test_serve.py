"""The command, and the embedded model behind it."""

import argparse
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from kvboost_hf import ChunkStore, DraftTreeConfig
from kvboost_hf.assets import EMBEDDED_DRAFT_DIR, load_embedded
from tests.internals.cli import add_options, draft_trees, engine_settings, main, server_settings
from tests.internals.engine import EngineSettings
from tests.internals.server import ServerSettings
from tests.server import wire

pytestmark = pytest.mark.daily

_ASK: list[Any] = [
    {"role": "system", "content": "You read documents and answer questions about them."},
    {"role": "user", "content": "Anna lives in Oslo. She plays the piano.\n\nWhat does Anna play?"},
]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """`kvboost-hf serve`, and a client of it."""
    log = tmp_path_factory.mktemp("serve") / "log"
    folder = tmp_path_factory.mktemp("tier")
    model, tokenizer = load_embedded()
    with ChunkStore(model, tiers=[f"disk:{folder}"]) as store:  # by another attention
        store.warm("The lamp is red. " * 40, tokenizer=tokenizer)
    options = f"--chunk-size 16 --speculative-draft-model {EMBEDDED_DRAFT_DIR} --disk-cache-dir {folder}".split()
    chat = tmp_path_factory.mktemp("chat") / "chat.json"
    chat.write_text(json.dumps({"messages": _ASK[:1]}))
    options += ["--warm", _ASK[0]["content"], "--warm-chat", str(chat)]
    with (
        wire.process(log, *options, environment={"KVBOOST_HF_API_KEY": "key"}) as (server, at),
        openai.OpenAI(base_url=f"{at.url}/v1", api_key="key") as client,
    ):
        yield server, client
        client.models.list()
        client.chat.completions.create(model="reader", messages=_ASK, max_tokens=1)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    lines = [json.loads(line) for line in Path(log).read_text().splitlines() if line.startswith("{")]
    [started] = (line for line in lines if "max_model_len" in line)
    assert started["message"] == f"listening at {at.url}"
    assert (started["api_keys"], started["drafts"], started["attention"]) == (1, "auto", "kvboost_fa2")
    stages = [line["stage"] for line in lines if "stage" in line]
    assert [stage.split()[0] for stage in stages] == ["loading", "probing", "warming"]
    assert all(line.startswith("{") for line in Path(log).read_text().splitlines())
    assert {"/v1/models", "/v1/chat/completions"} <= {line.get("path") for line in lines}
    assert "piano" not in Path(log).read_text()
    assert "stored with `--attn-implementation sdpa`" in Path(log).read_text()
    assert "warm start 1 of 2: no chat begins with this text" in Path(log).read_text()
    assert "warm start 2 of 2" not in Path(log).read_text()


def test_it_answers_as_generate_does(process: tuple[Any, openai.OpenAI]) -> None:
    model, tokenizer = load_embedded()
    inputs = tokenizer.apply_chat_template(_ASK, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]  # type: ignore[arg-type, call-overload, index]
    cached = []
    for _ in range(2):
        answer = process[1].chat.completions.create(model="reader", messages=_ASK, temperature=0, max_tokens=16)
        assert answer.choices[0].message.content == tokenizer.decode(ids, skip_special_tokens=True)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(ids)
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    assert cached[1] > cached[0] >= 16  # what `--warm-chat` has computed
    assert cached[1] > len(inputs["input_ids"][0]) // 2  # type: ignore[call-overload, index]


def test_drafts_are_made(process: tuple[Any, openai.OpenAI]) -> None:
    process[1].completions.create(model="reader", prompt="Anna lives in", max_tokens=24, temperature=0)
    stats = process[1].get("/stats", cast_to=dict[str, Any])
    assert stats["speculation"]["accepted"] > 0


@pytest.mark.parametrize(
    ("flags", "trees"),
    [
        ("", None),
        ("--speculative-mode-policy none", None),
        ("--speculative-draft-model d --speculative-mode-policy none", None),
        ("--speculative-draft-model d", DraftTreeConfig()),
        ("--speculative draft:d", DraftTreeConfig()),
        ("--speculative draft:d --speculative-draft-model d", DraftTreeConfig()),
        ("--speculative auto --speculative-draft-model d", DraftTreeConfig()),
        ("--speculative auto", DraftTreeConfig()),
        ("--speculative mtp", DraftTreeConfig()),
        ("--speculative dflash:d", DraftTreeConfig()),
        ("--speculative lookup --speculative-gamma 4", DraftTreeConfig(policy="chain", depth=4)),
        ("--speculative none", None),
        ("--speculative-draft-model d --speculative-gamma 4", DraftTreeConfig(policy="chain", depth=4)),
        ("--speculative-draft-model d --speculative-mode-policy flat", DraftTreeConfig(policy="chain")),
        (
            "--speculative-draft-model d --speculative-mode-policy tree --speculative-tree-max-branching 2 "
            "--speculative-tree-max-depth 3 --speculative-tree-node-budget 5",
            DraftTreeConfig(policy="tree", branching=2, depth=3, max_nodes=5),
        ),
    ],
)
def test_flags_of_drafts(flags: str, trees: DraftTreeConfig | None) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert draft_trees(parser.parse_args(flags.split())) == trees


def test_the_key_of_the_environment_is_asked_for(process: tuple[Any, openai.OpenAI]) -> None:
    with pytest.raises(openai.AuthenticationError):
        process[1].with_options(api_key="other").models.list()


def test_a_schema_is_kept_to(process: tuple[Any, openai.OpenAI]) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "lamp", "schema": schema | {"additionalProperties": False}},
    }
    answer = process[1].chat.completions.create(model="reader", messages=_ASK, response_format=form, seed=3)
    assert type(json.loads(answer.choices[0].message.content or "")["on"]) is bool


def test_a_stream_with_logprobs_and_several_choices(process: tuple[Any, openai.OpenAI]) -> None:
    said, logprobs = {0: "", 1: ""}, 0
    for chunk in process[1].chat.completions.create(
        model="reader", messages=_ASK, temperature=0, n=2, max_tokens=4, logprobs=True, top_logprobs=2, stream=True
    ):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            logprobs += len(choice.logprobs.content or ()) if choice.logprobs is not None else 0
    assert said[0] == said[1] != ""
    assert logprobs == 8


def test_too_long_prompts_are_refused_with_a_length(process: tuple[Any, openai.OpenAI]) -> None:
    with pytest.raises(openai.APIStatusError) as told:
        process[1].completions.create(model="reader", prompt=[5] * 9000, max_tokens=8)
    assert told.value.status_code == 400
    assert told.value.body["max_prompt_tokens"] < 9000  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--speculative-gamma", "4"], "--speculative-draft-model"),
        (
            ["--speculative", "eagle"],
            "`--speculative` must be one of auto, mtp, lookup, none, draft:NAME, eagle:NAME, dflash:NAME",
        ),
        (["--speculative", "draft:"], "got 'draft:'"),
        (["--speculative", "mtp"], "names no multi-token-prediction layers"),
        (["--speculative", "mtp", "--live-quant", "4"], "reads hidden states, which are kept neither"),
        (["--speculative", "dflash:d", "--repair", "query"], "reads hidden states, which are kept neither"),
        (["--speculative", "dflash:d", "--speculative-draft-model", "d"], "name two kinds of drafts"),
        (["--speculative", "lookup", "--speculative-draft-model", "d"], "name two kinds of drafts"),
        (["--speculative", "draft:a", "--speculative-draft-model", "b"], "name two kinds of drafts"),
        (["--speculative-draft-model", "small", "--speculative-tree-max-depth", "0"], "depth"),
        (
            ["--speculative-draft-model", "a", "--speculative-gamma", "4", "--speculative-mode-policy", "tree"],
            "--speculative-tree-max-depth",
        ),
        (["--keep-first-k", "2"], "--awq-streaming"),
        (["--awq-streaming"], "--model"),
        (["--chunk-size", "100"], "chunk_size"),
        (["--codec", "zip"], "'int8'"),
        (["--codec", "int8", "--kv-cache-bits", "4"], "Pass one of the two"),
        (["--live-quant", "4", "--repair", "query"], "cannot be moved"),
        (["--recompute-ratio", "0.3"], "cacheblend, query, first_k"),
        (["--repair", "none", "--recompute-ratio", "0.3"], "must be left out with `--recompute-strategy none`"),
        (["--repair", "query", "--recompute-ratio", "3"], "from 0 to 1"),
        (["--chunk-boundary-window", "128"], "less than `chunk_size`"),
        (["--disk-folder", "x"], "--awq-streaming"),
        (["--awq-streaming", "--host-budget", "1GB"], "Pass a folder"),
        (["--awq-streaming", "--disk-folder", "x", "--n-staging-slots", "1"], "2 or more"),
        (["--max-batch-size", "0"], "max_batch_size"),
        (["--api-key", ""], "api_keys"),
        (["--drain-s", "inf"], "`drain_s` must be from 0 to 86400, got inf."),  # no thread can wait for so long
        (["--batch-window-ms", "1e12"], "`batch_window_ms` must be from 0 to 86400000"),
        (["--model-name", "\udcfc"], "`model_name` must be a text in UTF-8"),  # every answer was an error
        (["--model-alias", "\udcfc"], "`model_aliases` must be names in UTF-8"),
        (["--attn-implementation", "flash"], "'eager' or 'kvboost_fa2'"),
        (["--attn-implementation", "flash_attention_2"], "got 'flash_attention_2'"),  # whose package is not there
        (["--model", "/nowhere/model"], "got '/nowhere/model', which is no folder here"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments, "--device", "cpu", "--port", "0"]) == 2
    assert says in capsys.readouterr().err


def test_a_model_has_a_name() -> None:
    with pytest.raises(ValueError, match=r"`model_name` must be a text in UTF-8, and not empty, .* got ''\."):
        ServerSettings(model_name="")


def test_flags_that_are_left_out_change_nothing() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args([])
    assert server_settings(options, "reader", None) == ServerSettings(model_name="reader")
    assert engine_settings(options) == EngineSettings()
    for told in (
        "run at once (default: 8)",
        "status 429 (default: 64)",
        "leave free (default: 0.15)",
        "(default: 63)",
    ):
        assert told in " ".join(parser.format_help().split())
