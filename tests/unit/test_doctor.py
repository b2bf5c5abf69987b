"""`kvboost-hf doctor` says what works and what to do about the rest."""

from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.internals.cli import main


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_machine_on_which_all_works(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0}, raising=False)
    assert main(["doctor", "--device", "cpu"]) == 0
    lines = _lines(capsys)
    assert {line.split()[1] for line in lines if line.startswith("ok  ")} >= {"Python", "torch", "exact", "extra"}
    assert lines[-1] == "All works. Next: kvboost-hf demo"


def test_what_is_to_be_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def version(name: str) -> str:
        if name == "fastapi":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    found = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--device", "cpu", "--model", str(tmp_path)]) == 1
    lines = _lines(capsys)
    again = f"kvboost-hf doctor --model {tmp_path}"
    assert lines[-1] == f"To do: processor, GPU, model. Then, once more: {again}"
    told = "\n".join(lines)
    assert "set it to 64" in told
    assert "https://pytorch.org/get-started/locally" in told
    assert "pip install '.[server]' in a clone of kvboost_hf, for `kvboost-hf serve`" in told
    assert f"'{tmp_path}' does not load: the folder has no config.json" in told
