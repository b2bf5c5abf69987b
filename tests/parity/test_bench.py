"""`kvboost-hf bench`: what it counts is the same in every run, and what is broken is told."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.turboquant.sabotage import sabotaged
from kvboost_hf.assets import EMBEDDED_MODEL_DIR
from kvboost_hf.config import KVQuantConfig
from tests.internals.bench import (
    ARMS,
    PEERS,
    PLAIN,
    WORKLOADS,
    Arm,
    Contender,
    MeasuredRow,
    ModelOrigin,
    Models,
    OurServer,
    Peer,
    PeerElsewhere,
    PeerError,
    PeerProcess,
    Result,
    Series,
    Settings,
    make_environment,
    peers_at_hand,
    run,
    summaries,
)
from tests.internals.cli import main
from tests.internals.prompts import AskedPrompt

EMBEDDED = ModelOrigin()


@dataclass(frozen=True, kw_only=True)
class Broken(Arm):
    """An arm whose store gives back zeros."""

    def open(self, models: Models, tokenizer: Any, folder: Path | None) -> OurServer:
        server = super().open(models, tokenizer, folder)
        assert server.store is not None
        server.store.codec = sabotaged(KVQuantConfig(method="kivi", key_bits=8, value_bits=8), "zeroed")
        return server


def small(arms: Sequence[Arm], workloads: Sequence[str], peers: Sequence[Contender] = (), prompts: int = 3) -> Result:
    settings = Settings(prompts=prompts, repeats=1)
    return run(EMBEDDED, [Series(WORKLOADS[name], arms) for name in workloads], peers, settings)


def counts(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """The rows without what a clock decides."""
    return [replace(row, served=replace(row.served, ttft_ms=0.0, total_ms=0.0)) for row in rows]


def of(result: Result, arm: str, workload: str) -> list[MeasuredRow]:
    return [row for row in result.rows if (row.arm, row.workload) == (arm, workload)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arms", "workloads"),
    [(list(ARMS), ["rag"]), (["exact", "all"], [name for name in WORKLOADS if not WORKLOADS[name].restarts])],
    ids=["all arms", "all workloads"],
)
def test_two_runs_count_the_same(arms: list[str], workloads: list[str]) -> None:
    once, again = (small([ARMS[name] for name in arms], workloads, prompts=2) for _ in range(2))
    assert once.refused == {}
    assert {(row.workload, row.arm) for row in once.rows} == {(w, arm) for w in workloads for arm in ["plain", *arms]}
    assert counts(once.rows) == counts(again.rows)
    assert all(row.same for row in once.rows if ARMS[row.arm].lossless)


def test_counts_are_those_of_the_model() -> None:
    names = ("exact", "exact-store", "blend-first_k", "draft", "lookup")
    once = small([ARMS[name] for name in names], ["chat", "rag"])
    for arm in ("exact", "exact-store", "draft", "lookup"):
        assert all(row.same for row in once.rows if row.arm == arm)
    for plain, exact in zip(of(once, "plain", "chat"), of(once, "exact", "chat"), strict=True):
        assert plain.served.prefilled == plain.prompt_tokens
        assert plain.served.forwarded == plain.prompt_tokens + len(plain.served.ids) - 1
        assert exact.served.reused is not None
        assert exact.served.prefilled == exact.prompt_tokens - exact.served.reused
    assert of(once, "exact", "chat")[-1].served.prefilled < of(once, "plain", "chat")[-1].served.prefilled
    # A repair sends fewer tokens through later layers: what is counted is less than the prompt.
    assert of(once, "blend-first_k", "rag")[-1].served.prefilled < 0.8 * of(once, "plain", "rag")[-1].prompt_tokens


def test_a_broken_store_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Broken(name="exact-store", codec="int8")
    rows = of(small([broken], ["chat"], prompts=4), "exact-store", "chat")
    assert [row.same for row in rows if not row.served.reused] == [True, True]
    assert not all(row.same for row in rows if row.served.reused)
    assert summaries(rows + of(small([], ["chat"], prompts=4), "plain", "chat"))[0].same < 4
    monkeypatch.setitem(ARMS, "exact-store", broken)
    arguments = ["bench", "--arms", "exact-store", "--workloads", "chat", "--prompts", "4", "--repeats", "1"]
    assert main(arguments) == 0  # int8 need not be the same
    monkeypatch.setattr(Broken, "lossless", True)
    assert main(arguments) == 1
    assert "3/4" in capsys.readouterr().out


@pytest.mark.slow
def test_a_new_process_finds_what_is_on_disk() -> None:
    steps: list[tuple[str, int, int]] = []
    shown: list[tuple[str, int]] = []
    result = run(
        EMBEDDED,
        [Series(WORKLOADS["restart"], [ARMS["exact-store"]])],
        [],
        Settings(prompts=2, repeats=1),
        lambda *step: steps.append(step),
        lambda workload, rows: shown.append((workload.name, len(rows))),
    )
    assert steps[-3:] == [("restart", 2, 4), ("restart, in a new process", 2, 4), ("restart, in a new process", 4, 4)]
    assert shown == [("restart", len(result.rows))]
    plain, stored = of(result, "plain", "restart"), of(result, "exact-store", "restart")
    assert [row.prompt for row in stored] == [1]
    assert plain[0].served.reused == 0
    assert stored[0].same
    assert stored[0].served.store_bytes
    reused = stored[0].served.reused
    assert reused is not None
    # Where reading seems slower than computing, all of it is computed.
    assert stored[0].served.prefilled == stored[0].prompt_tokens - reused


@pytest.mark.slow
def test_transformers_own_ways() -> None:
    def fail(_: object) -> Any:
        raise RuntimeError("not on\nthis machine")

    names = ("hf-kept", "hf-deepcopy", "hf-batching")
    result = small([ARMS["exact"]], ["chat"], [*(PEERS[name] for name in names), Peer("absent", fail)], prompts=4)
    assert result.refused == {"absent": "RuntimeError: not on this machine"}
    assert all(row.same for row in result.rows)
    exact, kept, copied = ([row.served.prefilled for row in of(result, arm, "chat")] for arm in ("exact", *names[:2]))
    assert kept == exact
    assert copied[0] == exact[0]
    assert copied[2] > exact[2]  # it knows the first prompt only


@pytest.mark.slow
def test_a_peer_answers_the_same_in_a_process_of_its_own() -> None:
    with PeerProcess(sys.executable, EMBEDDED) as process:
        result = small([], ["chat"], [PEERS["hf-kept"], PeerElsewhere("hf-deepcopy", process)])
    assert result.refused == {}
    assert counts(of(result, "hf-deepcopy", "chat")) == counts(
        of(small([], ["chat"], [PEERS["hf-deepcopy"]]), "hf-deepcopy", "chat")
    )


@pytest.mark.slow
def test_a_process_says_why_a_peer_does_not_run_there(tmp_path: Path) -> None:
    models, tokenizer = Models(EMBEDDED, tmp_path), EMBEDDED.tokenizer()
    with PeerProcess(sys.executable, ModelOrigin(random=(1, 64))) as process:
        peer = PeerElsewhere("kvboost-none", process)
        assert peer.refusal(models, tokenizer) == "ModuleNotFoundError: No module named 'kvboost'"
        with pytest.raises(PeerError, match="KeyError: 'nobody'"):
            PeerElsewhere("nobody", process).open(models, tokenizer, None)
        assert PeerElsewhere("hf-kept", process).refusal(models, tokenizer) is None
        process._process.kill()
        assert peer.refusal(models, tokenizer) == "its process has ended with status -9"


def wheel(folder: Path) -> Path:
    """A package of one module, ready to be installed, for which nothing has to be fetched."""
    path = folder / "only_there-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("only_there.py", "here = True\n")
        for name, lines in (
            ("METADATA", ("Metadata-Version: 2.1", "Name: only-there", "Version: 1.0")),
            ("WHEEL", ("Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any")),
            ("RECORD", ()),
        ):
            archive.writestr(f"only_there-1.0.dist-info/{name}", "".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.slow
def test_an_environment_has_all_that_is_here_and_one_package_more(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "there", str(wheel(tmp_path)))
    shown = "import only_there, torch, kvboost_hf; print(torch.__version__, kvboost_hf.__file__)"
    found = subprocess.run([python, "-P", "-c", shown], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert found.stdout.split() == [torch.__version__, sys.modules["kvboost_hf"].__file__]
    with pytest.raises(ModuleNotFoundError):
        __import__("only_there")


@pytest.mark.slow
def test_what_cannot_be_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(tmp_path / "missing-1.0-py3-none-any.whl")
    monkeypatch.setitem(PEERS, "missing", replace(PEERS["hf-kept"], name="missing", needs=missing))
    names = ["missing", "kvboost-none", "hf-kept"]
    with peers_at_hand(["missing"], EMBEDDED, install=True) as [peer]:
        assert str(peer.refusal(Models(EMBEDDED, tmp_path), None)).startswith(f"{missing} cannot be installed: ERROR")
    with peers_at_hand(names, EMBEDDED, install=False) as peers:
        refused = {peer.name: peer.refusal(Models(EMBEDDED, tmp_path), EMBEDDED.tokenizer()) for peer in peers}
    assert refused == {
        "missing": f"it needs {missing}: --install-peers gets it into an environment of its own",
        "kvboost-none": "it needs kvboost==0.9.0: --install-peers gets it into an environment of its own",
        "hf-kept": None,
    }


def test_the_command_writes_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    page, figures = tmp_path / "bench.html", tmp_path / "bench.json"
    arguments = ["bench", "--random", "1x64", "--arms", "exact", "--workloads", "few-shot", "--prompts", "2"]
    arguments += ["--repeats", "1", "--max-new-tokens", "2", "--html", str(page), "--json", str(figures)]
    assert main(arguments) == 0
    told = json.loads(figures.read_text())
    assert told["model"] == "random Llama, 1 layers of 64"
    assert {"command", "commit", "hardware", "threads", "versions"} == set(told["provenance"])
    assert [(row["arm"], row["same"]) for row in told["summaries"]] == [("plain", 2), ("exact", 2)]
    assert len(told["rows"]) == 4
    text = page.read_text()
    assert text.count("<svg") == 1
    assert "currentColor" in text
    assert "bench --random 1x64" in text
    assert not any(part in text for part in ("<script", "<link", "<img", "@import", "src="))


def test_a_model_that_is_named_is_asked_about_real_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By what a user chooses among; no right answer is known, so that none is counted."""
    figures, page = tmp_path / "bench.json", tmp_path / "bench.html"
    command = ["bench", "--model", str(EMBEDDED_MODEL_DIR), "--prompts", "2", "--max-new-tokens", "2"]
    assert main([*command, "--workloads", "shuffled", "--json", str(figures), "--html", str(page)]) == 0
    assert "right" not in capsys.readouterr().out.partition("TTFT: ")[0]
    assert "<th>right</th>" not in page.read_text()
    told = json.loads(figures.read_text())
    assert told["settings"]["repeats"] == 1
    assert [row["arm"] for row in told["summaries"]] == ["plain", "exact", "exact-store", "blend", "hf-kept"]
    reused = {row["arm"]: row["served"]["reused"] for row in told["rows"] if row["prompt"]}
    assert reused["blend"] > 500 > reused["exact"]  # what has moved
    assert {row["right"] for row in told["rows"]} == {None}
    assert main([*command, "--workloads", "facts"]) == 2
    assert (
        "`--workloads` must be of chat, shuffled, agent, restart for this model, got facts" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_model_of_the_hub(tmp_path: Path) -> None:
    """As it lies in the hub's cache; in a process of its own, which knows this cache from its start."""
    cached = tmp_path / "models--acme--reader"
    shutil.copytree(EMBEDDED_MODEL_DIR, cached / "snapshots" / "0a1b")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0a1b")
    command = [sys.executable, "-m", "kvboost_hf", "bench", "--model", "acme/reader", "--workloads", "restart"]
    command += ["--arms", "exact", "streamed", "draft", "--prompts", "2", "--repeats", "1", "--json", "-"]
    hub = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env={**os.environ, **hub}, check=True, capture_output=True, text=True)
    told = json.loads(found.stdout)
    assert told["model"] == "acme/reader"
    assert told["refused"] == {"draft": "no draft model: name one with --draft"}
    assert [(row["arm"], row["same"]) for row in told["summaries"]] == [("plain", 1), ("exact", 1), ("streamed", 1)]


@pytest.mark.parametrize("instead", [None, ImportError, RuntimeError])
def test_who_interrupts_is_told_no_more(
    instead: type[Exception] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """Also where imports raise another error in its place: NumPy's, and that of a class in Python 3.11."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupt(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if instead is None:
                raise
        if instead is not None:
            raise instead("cannot load module more than once per process")

    monkeypatch.setattr("kvboost_hf.bench.command.run", interrupt)
    assert main(["bench"]) == 130
    assert capsys.readouterr().err == "kvboost-hf: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.daily
@pytest.mark.parametrize("random", [(0, 64), (1, 65)])
def test_sizes_that_are_none(random: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        ModelOrigin(random=random)


def test_what_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="`prompts` must be from 2 to 8, got 1"):
        Settings(prompts=1)
    assert main(["bench", "--model", "there", "--random", "2x64"]) == 2
    assert "must be None for a model with a name" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "--random", "big"])
    models = Models(ModelOrigin(name="there"), Path())
    assert ARMS["draft"].refusal(models, None) == "no draft model: name one with --draft"
    assert PLAIN.refusal(models, None) is None


def test_a_random_model_is_the_same_again() -> None:
    source = ModelOrigin(random=(1, 64))
    state = torch.random.get_rng_state()
    once, again = source.load().state_dict(), source.load().state_dict()
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert torch.equal(torch.random.get_rng_state(), state)


def prompts(name: str, count: int = 4) -> list[AskedPrompt]:
    asking = WORKLOADS[name].ask(EMBEDDED.tokenizer(), count, 0)
    asked = [next(asking)]
    while len(asked) < count:
        asked.append(asking.send(asked[-1].answer or ""))
    return asked


def test_workloads_are_what_they_say() -> None:
    tokenizer = EMBEDDED.tokenizer()
    agent = [tokenizer.decode(prompt.ids) for prompt in prompts("agent")]
    heads = [text.partition("You read")[0] for text in agent]
    assert len(set(heads)) == len(heads)
    bodies = [text.partition("You read")[2].rpartition("assistant")[0] for text in agent]
    assert all(after.startswith(before) for before, after in pairwise(bodies))
    shots = [tokenizer.decode(prompt.ids) for prompt in prompts("few-shot")]
    sets = [frozenset(text.split("<|im_start|>")[2:-2]) for text in shots]
    assert len(set(sets)) == 1
    assert len({text[:300] for text in shots}) > 1
    library = [tokenizer.decode(prompt.ids).split("\n\n")[:-1] for prompt in prompts("rag", 8)]
    shown = [document for documents in library for document in documents]
    assert 6 < len(set(shown)) < len(shown)
