"""`kvboost-hf bench` where something goes wrong: what was measured is kept, what failed is named, nothing is left."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Mamba2Config, Mamba2ForCausalLM, MistralConfig, MistralForCausalLM

from tests.internals.bench import (
    ARMS,
    PEERS,
    WORKLOADS,
    Arm,
    Contender,
    ContinuousBatching,
    Counted,
    ModelOrigin,
    Models,
    OurServer,
    Peer,
    PeerElsewhere,
    PeerProcess,
    Result,
    Series,
    Served,
    ServerTurns,
    Settings,
    remarks,
    run,
    served,
)
from tests.internals.cli import main

EMBEDDED = ModelOrigin()


def small(
    arms: Sequence[Arm],
    workloads: Sequence[str],
    peers: Sequence[Contender] = (),
    source: ModelOrigin = EMBEDDED,
    prompts: int = 2,
) -> Result:
    series = [Series(WORKLOADS[name], arms) for name in workloads]
    return run(source, series, peers, Settings(prompts=prompts, repeats=1))


class Plain:
    """Plain answers, until one is too many."""

    left = 0

    def __init__(self, counted: Counted) -> None:
        self._counted = counted

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Served:
        Plain.left -= 1
        if Plain.left < 0:
            raise RuntimeError("out\nof luck")
        return replace(served(*self._counted, ids, max_new_tokens), bypassed="it does not even try")

    def close(self) -> None:
        if Plain.left < 0:
            raise RuntimeError("not even that")


@dataclass(frozen=True, kw_only=True)
class NotInFolders(Arm):
    """It cannot be opened where it should keep something on disk."""

    def open(self, models: Models, tokenizer: Any, folder: Path | None) -> OurServer:
        if folder is not None:
            raise FileNotFoundError("no such folder")
        return super().open(models, tokenizer, None)


@pytest.mark.slow
def test_who_fails_takes_part_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plain, "left", 1 + 4 + 3)  # a try, a workload, and the first counted answer of the next
    peer, arm = Peer("unlucky", Plain), NotInFolders(name="nowhere")
    result = small([ARMS["exact"], arm], ["few-shot", "rag", "chat", "restart"], [peer])
    assert result.failed == {
        "unlucky": "in rag, RuntimeError: out of luck",
        "nowhere": "in restart, FileNotFoundError: no such folder",
    }
    found = {(row.workload, row.arm) for row in result.rows}
    assert found == {(name, arm) for name in ("few-shot", "rag", "chat", "restart") for arm in ("plain", "exact")} | {
        ("few-shot", "unlucky"),
        *((name, "nowhere") for name in ("few-shot", "rag", "chat")),
    }
    assert remarks(result)[:3] == [
        "Failed: unlucky: in rag, RuntimeError: out of luck",
        "Failed: nowhere: in restart, FileNotFoundError: no such folder",
        "Reused nothing: unlucky: it does not even try",
    ]


def test_a_server_that_cannot_be_closed_has_failed() -> None:
    class Stuck(Plain):
        def close(self) -> None:
            raise OSError("no space left")

    Plain.left = 1000
    result = small([ARMS["exact"]], ["few-shot"], [replace(PEERS["hf-kept"], name="stuck", make=Stuck)])  # type: ignore[arg-type]
    assert result.refused == {"stuck": "OSError: no space left"}
    with ServerTurns("plain") as turns:
        turns.open("stuck", lambda: Stuck(Models(EMBEDDED, Path()).get()))
        turns.open("plain", lambda: Plain(Models(EMBEDDED, Path()).get()))
    assert turns.failed == {"stuck": "OSError: no space left"}


@pytest.mark.parametrize("place", ["trial", "start"])
def test_batching_that_fails_keeps_no_thread(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the interpreter would never end."""
    answer, calls = ContinuousBatching.answer, [0]

    def fail(server: ContinuousBatching, *asked: Any) -> Served:
        calls[0] += 1
        if calls[0] == (1 if place == "start" else 2):
            raise RuntimeError("out of luck")
        return answer(server, *asked)

    before = set(threading.enumerate())
    monkeypatch.setattr(ContinuousBatching, "answer", fail)
    refusal = PEERS["hf-batching"].refusal(Models(EMBEDDED, Path()), EMBEDDED.tokenizer())
    assert refusal == "RuntimeError: out of luck"
    assert [thread for thread in set(threading.enumerate()) - before if not thread.daemon] == []


@pytest.mark.slow
def test_what_else_a_process_writes_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To the file itself, as C code does: it goes where errors go. What comes in place of an answer ends all."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\nimport kvboost_hf.bench.peers as p\nopen_ = p.KeptCache.__init__\n"
        "def init(self, counted):\n    os.write(1, b'compiling...\\n'); open_(self, counted)\n"
        "p.KeptCache.__init__ = init\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    models, tokenizer = Models(EMBEDDED, tmp_path), EMBEDDED.tokenizer()
    with PeerProcess(sys.executable, EMBEDDED) as process:
        assert PeerElsewhere("hf-kept", process).refusal(models, tokenizer) is None
        process._said.seek(0)
        assert "compiling..." in process._said.read()
        with monkeypatch.context() as patch:
            patch.setattr(process._process, "stdout", io.StringIO("no answer\n"))
            assert "has ended with status -9" in str(PeerElsewhere("hf-kept", process).refusal(models, tokenizer))


def test_without_plain_answers_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost_hf.bench.arms.served", lambda *_, **__: Plain.answer(None, [], 0))
    monkeypatch.setattr(Plain, "left", 0)
    with pytest.raises(RuntimeError, match="of luck"):
        small([], ["chat"])


@pytest.mark.slow
def test_a_process_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with PeerProcess(sys.executable, EMBEDDED) as process:
        peer = PeerElsewhere("hf-kept", process)
        answer = OurServer.answer

        def kill(server: OurServer, *asked: Any) -> Served:
            process._process.kill()
            return answer(server, *asked)

        monkeypatch.setattr(OurServer, "answer", kill)
        result = small([ARMS["exact"]], ["chat"], [peer])
    assert result.failed == {"hf-kept": "in chat, OSError: its process has ended with status -9"}
    assert {row.arm for row in result.rows} == {"plain", "exact"}


@pytest.mark.slow
def test_who_does_not_wait_for_a_process_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def readline(self) -> str:
            raise KeyboardInterrupt

        def close(self) -> None: ...

    with PeerProcess(sys.executable, EMBEDDED) as process:
        server = PeerElsewhere("hf-kept", process).open(Models(EMBEDDED, Path()), None, None)
        with monkeypatch.context() as patch:
            patch.setattr(process._process, "stdout", Interrupted())
            with pytest.raises(KeyboardInterrupt):
                server.answer([1, 2, 3], 2)
        begin = time.monotonic()
        server.close()  # its answer, which comes too late, is not taken for that of this
        assert time.monotonic() - begin < 30
        with pytest.raises(OSError, match="has ended with status -9"):
            server.answer([1, 2, 3], 2)


@pytest.mark.slow
def test_termination_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvboost_hf", "bench", "--workloads", "restart", "--arms", "exact"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--repeats", "1000"], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/*-exact")):  # K/V on disk
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_what_is_named_twice_is_run_once(tmp_path: Path) -> None:
    figures = tmp_path / "bench.json"
    arguments = ["bench", "--workloads", "chat", "chat", "--arms", "exact", "exact", "--prompts", "2"]
    assert main([*arguments, "--repeats", "1", "--json", str(figures)]) == 0
    told = json.loads(figures.read_text())
    assert [(row["arm"], row["prompts"], row["same"]) for row in told["summaries"]] == [
        ("plain", 2, 2),
        ("exact", 2, 2),
    ]
    assert (told["dtype"], told["failed"]) == ("float32", {})


@pytest.mark.slow
def test_a_failure_is_told_by_the_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(ARMS, "exact", NotInFolders(name="exact"))
    assert main(["bench", "--workloads", "restart", "--arms", "exact", "--prompts", "2", "--repeats", "1"]) == 1
    assert "Failed: exact: in restart, FileNotFoundError: no such folder" in capsys.readouterr().out


@pytest.mark.daily
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--html", "nowhere/page.html"], "'nowhere/page.html' cannot be written"),
        (["--json", "."], "'.' cannot be written"),
        (["--json", f"{__file__}/bench.json"], "bench.json' cannot be written"),
        (["--json", 300 * "a"], "cannot be written"),
        (["--dtype", "float8"], "invalid choice: 'float8'"),
        (["--peers", "hf-lost"], "invalid choice: 'hf-lost'"),
    ],
)
def test_what_can_be_seen_at_once_is_told_at_once(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments])
    assert told in capsys.readouterr().err


@pytest.mark.daily
@pytest.mark.parametrize("command", ["bench", "demo", "check", "serve"])
@pytest.mark.parametrize("device", ["gpu", "cuda:99", "hpu", "meta"])
def test_a_device_that_is_not_there(command: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--device", device]) == 2
    assert f"one that PyTorch finds here, such as cpu, got '{device}'" in capsys.readouterr().err


def test_a_figure_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--figure", "-"])
    assert "name a file" in capsys.readouterr().err
    assert main(["bench", "--json", "-", "--html", "-"]) == 2
    assert "must not both be '-'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"), [(["--install-peers"], "pass `--peers`"), (["--draft", "none"], "`--draft` is for arms")]
)
def test_flags_for_nobody(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_page_that_could_not_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--html", str(tmp_path / "page.html")]) == 2
    assert "pip install '.[demo]' in a clone" in capsys.readouterr().err


@pytest.mark.slow
def test_peers_that_have_nothing_to_do_say_so() -> None:
    assert small([], ["restart"], [PEERS["hf-kept"]]).refused == {"hf-kept": "it keeps nothing for another process"}


# Models that are not like Llama


def saved(folder: Path, make: type, config: Any) -> ModelOrigin:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make(config).save_pretrained(folder)
    EMBEDDED.tokenizer().save_pretrained(folder)
    return ModelOrigin(name=str(folder))


def test_a_model_with_windows(tmp_path: Path) -> None:
    """Caches of transformers can be cut there, too, if they are told so beforehand; those of 5.17 begin anew."""
    config = MistralConfig(
        vocab_size=len(EMBEDDED.tokenizer()),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=64,
        eos_token_id=None,
    )
    source = saved(tmp_path, MistralForCausalLM, config)
    peers = [PEERS["hf-kept"], PEERS["hf-deepcopy"]]
    result = small([ARMS["exact"]], ["rag", "chat"], peers, source, prompts=4)
    assert (result.refused, result.failed) == ({}, {})
    assert all(row.same for row in result.rows)
    cut = ["exact", "hf-kept", "hf-deepcopy"] if Version(transformers.__version__) >= Version("5.18") else ["exact"]
    assert all(row.served.reused for row in result.rows if row.prompt == 1 and row.arm in cut)


def test_a_model_whose_cache_has_another_name(tmp_path: Path) -> None:
    config = Mamba2Config(
        vocab_size=len(EMBEDDED.tokenizer()),
        hidden_size=32,
        num_heads=4,
        head_dim=16,
        state_size=16,
        n_groups=1,
        num_hidden_layers=2,
        eos_token_id=None,
    )
    result = small(
        [ARMS["exact"], ARMS["exact-store"]], ["few-shot"], source=saved(tmp_path, Mamba2ForCausalLM, config)
    )
    assert (result.refused, result.failed) == ({}, {})
    assert all(row.same for row in result.rows)
