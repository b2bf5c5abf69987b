"""The command, as a person runs it: on the embedded model, on a folder, and wrongly."""

import itertools
import json
from pathlib import Path

import pytest
from transformers import BertConfig, BertLMHeadModel

from kvboost_hf.assets import EMBEDDED_MODEL_DIR
from kvboost_hf.cli import main
from kvboost_hf.demo.workloads import CHAT_SHAPE


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure, figures = tmp_path / "demo.png", tmp_path / "demo.json"
    assert main(["demo", "--repeats", "1", "--figure", str(figure), "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    assert "speed-up" in shown
    assert figure.read_bytes().startswith(b"\x89PNG")
    result = json.loads(figures.read_text())
    chat, questions = result["chat"], result["questions"]
    assert all(row["same_tokens"] for row in chat + questions)
    for row, target in zip(chat, CHAT_SHAPE, strict=True):
        assert abs(row["prompt_tokens"] - target) <= 24
    # Of what earlier turns forwarded, all but a few tokens a turn are reused: it is the new text that is computed.
    for before, row in itertools.pairwise(chat):
        assert row["forwarded_tokens"] <= row["prompt_tokens"] - before["prompt_tokens"] + 8
        assert row["reused_tokens"] + row["forwarded_tokens"] == row["prompt_tokens"]
    for row in questions[1:]:
        assert row["forwarded_tokens"] <= 24


def test_demo_on_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", "--model", str(EMBEDDED_MODEL_DIR), "--repeats", "1", "--max-new-tokens", "2", "--json", "-"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["model"] == EMBEDDED_MODEL_DIR.name


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    assert "exact reuse: yes" in capsys.readouterr().out


def test_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(tmp_path / "nothing-here")]) == 2
    assert capsys.readouterr().err.startswith("kvboost-hf: ")
    with pytest.raises(SystemExit):
        main(["demo", "--repeats", "0"])
    assert "positive number, got 0" in capsys.readouterr().err


def test_check_of_a_model_that_cannot_reuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BertLMHeadModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(tmp_path)
    for file in EMBEDDED_MODEL_DIR.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert main(["check", "--model", str(tmp_path)]) == 1
    assert "exact reuse: no, it is not causal" in capsys.readouterr().out
