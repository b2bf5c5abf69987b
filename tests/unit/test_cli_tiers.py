"""`kvboost-hf warm` and `inspect` on a folder, as a person runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.assets import load_embedded
from tests.internals.cache import ComputePace
from tests.internals.cli import main

pytestmark = pytest.mark.daily

TEXT = "Anna lives in Oslo. She plays the piano. The lamp is red. It costs ten coins. " * 8


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{name}.txt" for name in "ab"]
    for number, path in enumerate(paths):
        path.write_text(f"Text {number}. {TEXT}", encoding="utf-8")
    return [str(path) for path in paths]


@pytest.fixture
def disk(tmp_path: Path) -> str:
    return f"disk:{tmp_path / 'tier'}"


def listed(disk: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    found = tmp_path / "found.json"
    assert main(["inspect", "--tiers", disk, "--tokenizer", "embedded", "--json", str(found)]) == 0
    capsys.readouterr()
    lines: list[dict[str, object]] = json.loads(found.read_text(encoding="utf-8"))
    return lines


def test_what_is_warmed_is_reused(
    tmp_path: Path, files: list[str], disk: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1.0)
    own = ["--tiers", disk, "--chunk-size", "64", "--chunk-boundary-window", "0", "--attn-implementation", "sdpa"]
    text = Path(files[1]).read_text(encoding="utf-8")
    Path(files[1]).write_text(text, encoding="utf-8-sig")  # as editors on Windows write it
    assert main(["warm", *files, *own, "--dtype", "float32"]) == 0
    shown = capsys.readouterr().out
    assert "a.txt: prompt" in shown
    assert "chunks" in shown
    assert f"\n  kvboost-hf inspect --tiers {disk} " in shown
    model, tokenizer = load_embedded()
    store = ChunkStore(model.float(), chunk_size=64, tiers=[disk])
    inputs = tokenizer(text + "Who?", return_tensors="pt")
    cache = ChunkReuseCache(model, store)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=1)
    assert cache.report.tier_tokens["disk"] > 100
    store.close()
    assert main(["warm", *files, *own, "--dtype", "float32"]) == 0
    assert "(0%)" not in capsys.readouterr().out


def test_inspect_shows_it(
    tmp_path: Path, files: list[str], disk: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["warm", *files, "--tiers", disk, "--documents", "--salt", "me", "--codec", "int8"]) == 0
    capsys.readouterr()
    lines = listed(disk, tmp_path, capsys)
    assert {line["kind"] for line in lines} == {"content"}
    assert any("Anna lives in Oslo" in str(line["text"]) for line in lines)
    assert main(["inspect", "--tiers", disk, "--json", "-"]) == 0
    out = capsys.readouterr()
    assert len(json.loads(out.out)) == len(lines)
    assert f"{len(lines)} stored" in out.err
    assert main(["inspect", "--tiers", disk, "--limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"1 of {len(lines)} shown" in shown
    assert f"--model NAME --tiers {disk} " in shown
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["inspect", "--tiers", disk]) == 0
    assert "┃ hits ┃" in capsys.readouterr().out


def test_inspect_gives_nothing_up(
    tmp_path: Path, files: list[str], disk: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever budget its address names, or does not."""
    assert main(["warm", *files, "--tiers", disk]) == 0
    before = listed(disk, tmp_path, capsys)
    assert listed(f"{disk}:1KB", tmp_path, capsys) == before
    assert listed(disk, tmp_path, capsys) == before != []


def run_inspect(streams: str, folder: Path, encoding: str = "utf-8") -> "subprocess.CompletedProcess[bytes]":
    """Run the command in a shell with its streams as they are given there."""
    command = f'set -o pipefail; "$0" -m kvboost_hf inspect --tiers "disk:$1" {streams}'
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    arguments = ["bash", "-c", command, sys.executable, str(folder)]
    return subprocess.run(arguments, capture_output=True, check=False, env=environment)


def test_standard_output_that_is_closed_or_lacks_characters(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "Ü"
    Path(files[0]).write_text("Die Tür ist rot.", encoding="utf-8")
    assert main(["warm", files[0], "--tiers", f"disk:{folder}"]) == 0
    assert run_inspect("| true", folder).returncode == 141  # as of SIGPIPE
    assert run_inspect(">&- 2>&-", folder).returncode == 0
    shown = run_inspect("", folder, "ascii")
    assert shown.returncode == 0
    assert b"\\xdc: chunks" in shown.stdout
    listed = run_inspect("--json - --tokenizer embedded", folder, "ascii")
    assert json.loads(listed.stdout)[0]["text"] == "Die Tür ist rot."


@pytest.mark.parametrize("tiers", [["nonsense"], ["disk:"], ["disk:/x:0GB"], ["ram:1GB"], ["ram:lots"]])
def test_bad_addresses(tiers: list[str], files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect", "--tiers", *tiers], ["warm", *files, "--tiers", *tiers]):
        if command[0] == "warm" and tiers == ["ram:1GB"]:
            continue  # of use to nobody, but no mistake
        assert main(command) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("kvboost-hf: ")


@pytest.mark.parametrize("scheme", ["disk:", "file://", "handover:"])
def test_the_size_of_an_address_is_a_limit(
    scheme: str, tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the folder is named from the current one; `inspect` gives nothing up for it; `warm` says what is."""
    monkeypatch.chdir(tmp_path)
    assert main(["warm", *files, "--tiers", f"{scheme}kv:1M", "--chunk-size", "16"]) == 1
    assert "have no room" in capsys.readouterr().out
    found = listed(f"{scheme}kv:1K", tmp_path, capsys)
    assert 500_000 < sum(int(str(line["nbytes"])) for line in found) <= 1_000_000
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "b.txt", "kv", "found.json"}
    assert main(["warm", *files, "--tiers", f"{scheme}more:50M", "--chunk-size", "16"]) == 0
    assert " 0 chunks" not in capsys.readouterr().out


def test_inspect_makes_nothing_in_a_folder_that_is_no_tier(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["inspect", "--tiers", f"disk:{tmp_path}"]) == 2
    assert f"no K/V was ever stored in the folder '{tmp_path}'" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    assert main(["inspect", "--tiers", f"disk:{missing}"]) == 2
    assert f"there is no folder '{missing}'" in capsys.readouterr().err
    assert not missing.exists()


def test_a_bad_codec_and_a_prefix_without_documents(
    files: list[str], disk: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warm", *files, "--tiers", disk, "--codec", "zip"]) == 2
    assert "zip" in capsys.readouterr().err
    assert main(["warm", *files, "--tiers", disk, "--prefix", files[0]]) == 2
    assert "needs `--documents`" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "why"), [(b"", "it is empty"), (b"\xff\xfe", "must be a text in UTF-8")])
def test_a_file_without_text_is_named(
    content: bytes, why: str, disk: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.txt"
    path.write_bytes(content)
    assert main(["warm", str(path), "--tiers", disk]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert why in error
