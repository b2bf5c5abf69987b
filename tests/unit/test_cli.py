"""The command, as a person runs it: on the embedded model, on a folder, and wrongly."""

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, BertConfig, BertGenerationConfig, BertGenerationDecoder

from kvboost_hf import StreamingConfig, load_streamed, streaming_plan, what_fits
from kvboost_hf.assets import EMBEDDED_MODEL_DIR
from tests.internals.cli import main, read_prompts
from tests.internals.prompts import CHAT_SHAPE

pytestmark = pytest.mark.daily

SMOLLM2 = Path(__file__).parents[2] / ".models" / "smollm2" / "float32"


def rows(told: dict[str, Any], workload: str) -> list[dict[str, Any]]:
    return next(one["rows"] for one in told["workloads"] if one["name"] == workload)


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure, figures = tmp_path / "demo.png", tmp_path / "demo.json"
    assert main(["demo", "--repeats", "1", "--figure", str(figure), "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    assert all(head in shown for head in ("computed", "right", "The last prompt of each"))
    assert "20 of 20 answers have the tokens of plain generate()" in shown
    assert "KL" not in shown  # what no table has is not explained
    assert figure.read_bytes().startswith(b"\x89PNG")
    told = json.loads(figures.read_text())
    chat, document, shuffled = (rows(told, name) for name in ("chat", "document", "shuffled"))
    assert all(row["arms"]["exact"]["same_tokens"] for row in chat + document + shuffled)
    for row, target in zip(chat, CHAT_SHAPE, strict=True):
        assert abs(row["prompt_tokens"] - target) <= 24
    # Of what earlier turns forwarded, all but a few tokens a turn are reused: it is the new text that is computed.
    for before, row in itertools.pairwise(chat):
        exact = row["arms"]["exact"]
        assert exact["forwarded_tokens"] <= row["prompt_tokens"] - before["prompt_tokens"] + 8
        assert exact["reused_tokens"] + exact["forwarded_tokens"] == row["prompt_tokens"]
        assert exact["kl"] < 1e-6
    for row in document[1:]:
        assert row["arms"]["exact"]["forwarded_tokens"] <= 24
    for row in shuffled:  # each prompt starts with another document: exact reuse finds next to nothing
        arms = row["arms"]
        assert arms["exact"]["reused_tokens"] <= 0.1 * row["prompt_tokens"]
        assert arms["blend"]["reused_tokens"] >= arms["exact"]["reused_tokens"]
        assert arms["blend"]["forwarded_tokens"] >= row["prompt_tokens"] - arms["blend"]["reused_tokens"]
        assert arms["plain"]["right"]
        assert arms["blend"]["right"]
    assert shuffled[0]["arms"]["blend"]["moved_tokens"] == 0  # nothing was seen before
    for row in shuffled[1:]:
        assert row["arms"]["blend"]["moved_tokens"] >= 0.8 * row["prompt_tokens"]
        assert row["arms"]["blend"]["forwarded_tokens"] <= 0.4 * row["prompt_tokens"]


def test_demo_on_prompts_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = "Anna lives in Oslo. She plays the piano. The lamp is red. It costs ten coins. " * 8
    chat = [{"role": "user", "content": f"{document}Where does Anna live?"}]
    prompts, figures = tmp_path / "prompts.json", tmp_path / "demo.json"
    prompts.write_text(json.dumps([f"{document}Who?", f"{document}What colour is the lamp?", chat, chat]))
    command = ["demo", "--repeats", "1", "--prompts", str(prompts)]
    assert main([*command, "--json", str(figures)]) == 0
    assert "4 of 4 answers have the tokens of plain generate()" in capsys.readouterr().out
    (workload,) = json.loads(figures.read_text())["workloads"]
    reused = [row["arms"]["exact"]["reused_tokens"] for row in workload["rows"]]
    assert reused[0] == 0
    assert all(count > 100 for count in (reused[1], reused[3]))
    prompts.write_text("[3]")
    assert main(command) == 2
    assert "must be a text or a list of messages" in capsys.readouterr().err


@pytest.mark.slow
def test_demo_on_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any model but the embedded one gets real text; no right answer is known."""
    figures, folder = tmp_path / "demo.json", tmp_path / "models" / "reader"
    shutil.copytree(EMBEDDED_MODEL_DIR, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    assert main(["demo", "--model", str(folder), "--max-new-tokens", "2", "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    assert "right" not in shown.lower()
    assert "KL from" not in shown.partition("An agent's transcript")[0]
    assert f"kvboost-hf bench --model {folder}" in shown
    assert all(len(line) <= 80 for line in shown.partition("TTFT: ")[0].splitlines())
    told = json.loads(figures.read_text())
    assert told["model"] == "models/reader"
    assert [one["name"] for one in told["workloads"]] == ["chat", "document", "agent", "shuffled"]
    prompts = [row["prompt_tokens"] for one in told["workloads"] for row in one["rows"]]
    assert 1024 < max(prompts) <= 2048 - 2  # fits into the context
    for before, row in itertools.pairwise(rows(told, "agent")):
        assert row["arms"]["exact"]["forwarded_tokens"] <= row["prompt_tokens"] - before["prompt_tokens"] + 8
    assert all(row["arms"]["exact"]["same_tokens"] for one in told["workloads"] for row in one["rows"])
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    assert main(["demo", "--model", str(folder)]) == 2
    assert "takes 256 tokens" in capsys.readouterr().err


def untimed(report: dict[str, Any]) -> dict[str, Any]:
    """A report of verify without the times, which no two runs share."""
    for one in [*report["arms"], *(prompt for arm in report["arms"] for prompt in arm["prompts"])]:
        assert one.pop("first_token") > 0
        assert one.pop("answer") > 0
    return report


@pytest.mark.slow
def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, figure, figures = tmp_path / "prompts.txt", tmp_path / "verify.png", tmp_path / "verify.json"
    document = "Anna lives in Oslo. She plays the piano. The lamp is red. It costs ten coins. " * 8
    asked = [f"{document}Where does Anna live?", f"{document}What colour is the lamp?"]
    prompts.write_text("\n\n".join(asked), encoding="utf-8")
    command = ["verify", "--prompts", str(prompts), "--max-new-tokens", "4"]
    assert main([*command, "--figure", str(figure), "--json", str(figures)]) == 0
    assert "Exact reuse gives the answers of plain generate()" in " ".join(capsys.readouterr().out.split())
    assert figure.read_bytes().startswith(b"\x89PNG")
    result = json.loads(figures.read_text())
    assert result["ok"] is True
    assert [arm["name"] for arm in result["arms"]][:3] == ["full", "exact", "naive"]
    assert result["arms"][1]["reused_tokens"] > 100
    prompts.write_text(json.dumps(asked), encoding="utf-8")
    assert main([*command, "--json", "-"]) == 0
    assert untimed(json.loads(capsys.readouterr().out)) == untimed(result)
    (tmp_path / "document.txt").write_text(document, encoding="utf-8")
    assert main([*command, "--documents", str(tmp_path / "document.txt"), "--json", "-"]) == 0
    names = [arm["name"] for arm in json.loads(capsys.readouterr().out)["arms"]]
    assert names[:4] == ["full", "exact", "naive", "naive, warmed"]
    assert "auto 15%, warmed" in names
    assert main([*command, "--arms", "query:15", "selective", "--json", "-"]) == 0
    names = [arm["name"] for arm in json.loads(capsys.readouterr().out)["arms"]]
    assert names[3:] in ([], ["query 15%", "selective 16"])
    assert main([*command, "--arms", "query:x"]) == 2
    assert "or with a percentage as in query:15, got 'query:x'" in capsys.readouterr().err


def test_verify_codecs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["The lamp is red. It stands in the hall. " * 40 + "Where is it?"] * 2))
    command = ["verify", "--prompts", str(prompts), "--max-new-tokens", "4"]
    assert main([*command, "--codec", "int8", "--live-quant", "4", "--json", "-"]) == 0
    told = capsys.readouterr()
    assert "int8 is within the thresholds" in " ".join(told.err.split())
    arms = {arm["name"]: arm for arm in json.loads(told.out)["arms"]}
    assert list(arms) == ["full", "exact", "naive", "int8", "live turboquant:4", "int8, live turboquant:4"]
    assert all(arm["coded_tokens"] for arm in list(arms.values())[3:])
    assert 0 < arms["int8"]["mean_kl"] < 1e-3
    assert main([*command, "--codec", "turboquant:1"]) == 1
    assert "turboquant:1 is NOT within the thresholds" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--codec", "int3"]) == 2
    with pytest.raises(SystemExit):
        main([*command, "--live-quant", "8"])
    assert "must have from 1 to 4 bits, got 8. Pass 'int8' for 8 bits" in capsys.readouterr().err


def test_verify_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.json"
    for text, message in (
        ("", "it is empty"),
        ("\n", "at least one prompt"),
        ('["1", ', "JSON list"),
        ("[1.5]", "text or token ids"),
    ):
        prompts.write_text(text, encoding="utf-8")
        assert main(["verify", "--prompts", str(prompts)]) == 2
        assert message in capsys.readouterr().err
    assert main(["verify", "--prompts", str(tmp_path / "missing")]) == 2


def test_prompts_on_lines_that_begin_with_brackets(tmp_path: Path) -> None:
    file, prompts = tmp_path / "prompts.txt", ["[INST] Who\u2028lives\fin Rome? [/INST]", "[1] Who?", "[x, y]"]
    file.write_bytes("\r\n".join(prompts).encode())
    assert read_prompts(file) == prompts


@pytest.mark.parametrize("named", [(), ("--model", "embedded")])
def test_check(named: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *named]) == 0
    assert "exact reuse: yes" in capsys.readouterr().out


def test_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(tmp_path / "nothing-here")]) == 2
    assert capsys.readouterr().err.startswith("kvboost-hf: ")
    with pytest.raises(SystemExit):
        main(["demo", "--repeats", "0"])
    assert "whole positive number, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["demo", "--modle", "gpt2"],
            "demo: there is no flag --modle; did you mean --model? All flags: kvboost-hf demo -",
        ),
        (["demo", "--xyz=1"], "kvboost-hf demo: there is no flag --xyz. All flags: "),
        (["demo", "--json", "/nope/x"], "name a file in a folder that there is. All flags: "),
        (
            ["doctor", "gpt2"],
            "'gpt2' must have a flag before it. A model is named so: kvboost-hf doctor --model gpt2.",
        ),
        (
            ["inspect", "--tiers", "ram:1GB", "--limit", "1", "gpt2"],
            "inspect: 'gpt2' must have a flag before it. All ",
        ),
    ],
)
def test_the_flag_that_was_meant_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1  # the usage of a command fills a screen


def test_a_wrong_tier_is_refused_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "no/model", "--port", "0", "--tiers", "disk:"]) == 2
    assert "there is no path after 'disk:'" in capsys.readouterr().err


def test_check_of_a_model_that_cannot_reuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = BertGenerationConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=100)
    BertGenerationDecoder(config).save_pretrained(tmp_path)
    for file in EMBEDDED_MODEL_DIR.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert main(["check", "--model", str(tmp_path)]) == 1
    assert "exact reuse: no, it is not causal" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "fits", "serve", "verify"])
def test_an_encoder_is_refused_in_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    for file in EMBEDDED_MODEL_DIR.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    flags = {"fits": ["--vram-budget", "1GB"], "serve": ["--port", "0"]}
    assert main([command, "--model", str(tmp_path), *flags.get(command, [])]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "A model of the type 'bert' cannot generate text: it is an encoder." in said


def test_fits_recommends_what_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((EMBEDDED_MODEL_DIR / "config.json").read_text())
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    plan = ["fits", "--model", str(tmp_path), "--vram-budget", "1GB"]
    for quantized, flags, says in (
        (None, [], "serve .* --awq-streaming --vram-budget 1GB +# serve it within this budget"),
        (None, ["--bits", "16"], "serve it within this budget"),
        (None, ["--max-tokens", "64", "--on", "cpu"], "serve .* --max-live-tokens 64 --device cpu +# serve it"),
        (None, ["--prefill-chunk-size", "64"], "serve .* --prefill-chunk-size 64 --max-live-tokens 4096 +# serve it"),
        (None, ["--bits", "4"], "other weights than .* has: its own are not quantized. Name a checkpoint of it in 4"),
        (gptq, [], "serve it within this budget"),
        (gptq, ["--bits", "4"], "serve it within this budget"),
        (gptq, ["--bits", "16"], "other weights than .* has: its own have 4 bits"),
        ({**gptq, "bits": 8}, ["--bits", "4"], "other weights than .* has: `bits` of a GPTQ checkpoint must be 4"),
        (
            {"quant_method": "fp8"},
            ["--bits", "4"],
            "other weights than .* has: The checkpoint is quantized with 'fp8'",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
        assert main([*plan, *flags]) == 0
        said = capsys.readouterr().out
        assert re.search(says, said)
        assert ("kvboost-hf serve" in said) == says.startswith("serve")


def test_fits_says_what_a_budget_of_a_cpu_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a folder all layers stay, so that a budget below that is not kept."""
    asked = ["fits", "--model", str(EMBEDDED_MODEL_DIR), "--on", "cpu", "--max-tokens", "128", "--vram-budget"]
    assert main([*asked, "4MB"]) == 0
    said = capsys.readouterr().out
    assert "serve it" not in said
    assert "--vram-budget 4MB --max-tokens 128 --on cpu --disk-folder FOLDER   # a plan within this budget:" in said
    for flags in (["1GB"], ["4MB", "--disk-folder", str(tmp_path)]):
        assert main([*asked, *flags]) == 0
        assert "serve it within this budget" in capsys.readouterr().out


def test_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """What stays of a model whose weights are not there."""
    asked = ["fits", "--model", str(EMBEDDED_MODEL_DIR), "--max-tokens", "100"]
    assert main([*asked, "--vram-budget", "1GB"]) == 0
    assert "4 resident layers" in capsys.readouterr().out
    assert main([*asked, "--vram-budget", "1KB"]) == 2
    assert "must be at least" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["100MB", "4.5MB", "4MB", "3MB"])
def test_the_three_that_plan_agree(budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fits`, `what_fits` and `load_streamed`: the same layers stay, or the same error says which budget would do."""
    three_plan(EMBEDDED_MODEL_DIR, budget, tmp_path, capsys, max_tokens=128)


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="make real-model")
@pytest.mark.parametrize("budget", ["600MB", "500MB", "460MB", "440MB"])
def test_the_three_that_plan_agree_on_a_real_model(
    budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three_plan(SMOLLM2, budget, tmp_path, capsys, max_tokens=4096)


def three_plan(model: Path, budget: str, folder: Path, capsys: pytest.CaptureFixture[str], *, max_tokens: int) -> None:
    streaming = StreamingConfig(max_tokens=max_tokens, disk_folder=str(folder))
    flags = ["--vram-budget", budget, "--max-tokens", str(max_tokens), "--on", "cpu", "--disk-folder", str(folder)]
    asked = replace(streaming, vram_budget=budget)
    command = ["fits", "--model", str(model), *flags]
    if main(command) == 2:
        refusal = capsys.readouterr().err.removeprefix("kvboost-hf: ").strip()
        assert "must be at least" in refusal
        with pytest.raises(ValueError, match=re.escape(refusal)):
            what_fits(AutoConfig.from_pretrained(model), budget, streaming=streaming, device="cpu")
        with pytest.raises(ValueError, match=re.escape(refusal)):
            load_streamed(str(model), asked, device="cpu")
        return
    said = capsys.readouterr().out
    plan = what_fits(AutoConfig.from_pretrained(model), budget, streaming=streaming, device="cpu")
    loaded = load_streamed(str(model), asked, device="cpu")
    made = streaming_plan(loaded)
    assert (made is None) == (not plan.on_disk)
    assert plan.sizes.other_bytes < 1.01 * loaded.get_output_embeddings().weight.nbytes  # tied matrices count once
    assert made is None or made == plan
    assert said.startswith(str(plan))
    assert "On a CPU, weights in float32:" in said
