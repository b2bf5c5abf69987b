"""`make gpu-short` and `gpu-rest` keep their time, whatever a benchmark does, and what was found until then."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.daily

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
gpu: Any = pytest.importorskip("gpu")
targets: Any = pytest.importorskip("targets")
sys.path.pop(0)

RESULTS = BENCHMARKS / "results"
LARGE = {
    "prompts": [8192, 32768],
    "first": [
        {
            "attention": "sdpa",
            "tokens": 8192,
            "plain": 100.0,
            "floor": 10.0,
            "live": 10.5,
            "stored": 20.0,
            "cold": 101.0,
        }
    ],
    "next": [],
    "failed": ["next: OutOfMemoryError"],
    "skipped": ["launches: the minutes are over"],
}
FAKES = {
    "finds": f"open(out + '/large-cuda.json', 'w').write({json.dumps(LARGE)!r})",
    # Neither it nor the process that it starts ever ends.
    "overruns": "print('[gw0] [ 25%] FAILED tests/gpu/test_it.py::test_early[a b]', flush=True); "
    "import subprocess, time; child = subprocess.Popen(['sleep', '60']); "
    "open(out + '/child.md', 'w').write(str(child.pid)); time.sleep(60)",
    "crashes": "raise SystemExit('no such device')",
    "prints": "print('x' * 10_000_000); [print('FAILED tests/gpu/test_it.py::test_', n) for n in range(500)]; 1 / 0",
    "half": "open(out + '/awq-cuda.json', 'w').write('{\"cases\": [')",
    "sleeps": "import time; time.sleep(60)",
    "skips": "print('3 skipped in 0.1s')",
    "passes": "print('3 passed in 0.1s')",
}


def fake(name: str, weight: float = 1.0, *, judged: bool = False, step: str = "") -> Any:
    code = f"import sys; out = sys.argv[1]; {FAKES[name]}"
    command = [sys.executable, "-S", "-c", code, "{out}"]
    return gpu.Step(name=step or name, command=command, weight=weight, judged=judged)


def packed(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as found:
        return {Path(each.name).name: found.extractfile(each).read() for each in found.getmembers()}


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_time_is_kept_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [fake("finds", step="first-sdpa"), *map(fake, ("overruns", "crashes", "prints", "half"))]
    steps += [fake("passes", judged=True), fake("crashes", step="codes")]
    begin = time.monotonic()
    code = gpu.Part("gpu-short", steps, tmp_path, 0.12, 4000).run()
    assert time.monotonic() - begin < 60 * 0.12 + 1
    assert code == 2
    out = capsys.readouterr().out
    text = (tmp_path / "gpu-short.txt").read_text()
    assert out.endswith(text)
    assert len(text) <= 4000
    assert len(out) <= len(text) + len(steps) * gpu.LINE
    for line in (
        "FAILED crashes: exit code 1: no such device",
        "SKIPPED large-cuda: launches: the minutes are over",
        "FAILED overruns: FAILED tests/gpu/test_it.py::test_early[a b]",
        "PASS first token, sdpa, short prompt: live <= 1.10 of floor: 1.05 (10.5 ms, est. 1.13-1.25)",
        "MISS first token, sdpa, short prompt: stored <= 1.40 of floor: 2.00 (20.0 ms, est. 1.3)",
        "PASS first token, sdpa, short prompt: cold <= 1.05 of plain: 1.01 (101.0 ms)",
        "PASS passes: 3 passed in 0.1s",
        "FAILED int4, 1 over 128k >= 2.20 of bfloat16",
    ):
        assert f"\n{line}\n" in f"\n{text}"
    assert "SKIPPED overruns: ended, its time was over" in text
    assert re.search(r"^FAILED prints: \d+ more, in gpu-short.tar.gz$", text, re.MULTILINE)
    kinds = [line.partition(" ")[0] for line in text.splitlines()]
    assert set(kinds) == {"FAILED", "SKIPPED", "MISS", "PASS"}
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["gpu-short.tar.gz", "gpu-short.txt"]
    files = packed(tmp_path / "gpu-short.tar.gz")
    assert json.loads(files["large-cuda.json"]) == LARGE
    assert len(files["prints.log"]) <= gpu.KEPT_LOG_BYTES
    assert not is_running(int(files["child.md"]))


def test_a_step_of_a_background_job_is_ended_at_once(tmp_path: Path) -> None:
    """A shell's background jobs ignore Control-C, and what they start would, too."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        begin = time.monotonic()
        gpu.Part("gpu-short", [fake("sleeps")], tmp_path, 0.02).run()
        assert time.monotonic() - begin < 1 + gpu.END_S / 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_step_that_prints_without_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MOST_LOG_BYTES", 1_000_000)
    monkeypatch.setattr(gpu, "PACK_S", 0.1)
    monkeypatch.setitem(FAKES, "floods", "\nwhile True: print('x' * 1000)")
    begin = time.monotonic()
    assert gpu.Part("gpu-short", [fake("floods"), fake("passes")], tmp_path, 1.0).run() == 2
    assert time.monotonic() - begin < 20
    assert "FAILED floods: ended, it had printed more than 1 MB" in (tmp_path / "gpu-short.txt").read_text()


def test_codes_tell(tmp_path: Path) -> None:
    assert gpu.Part("gpu-short", [fake("passes", judged=True)], tmp_path, 0.1).run() == 0
    for broken, said in (("half", "FAILED awq-cuda.json cannot be read"), ("finds", "FAILED large-cuda: next: OutOf")):
        assert gpu.Part("gpu-short", [fake(broken)], tmp_path, 0.1).run() == 2
        assert said in (tmp_path / "gpu-short.txt").read_text()
    assert gpu.Part("gpu-short", [fake("skips", judged=True)], tmp_path, 0.1).run() == 1
    assert "MISS skips: 3 skipped in 0.1s" in (tmp_path / "gpu-short.txt").read_text()
    late = gpu.Part("gpu-short", [fake("sleeps", 1e6), fake("passes")], tmp_path, 0.01)
    assert late.run() == 1
    assert "SKIPPED passes: no time is left for it" in (tmp_path / "gpu-short.txt").read_text()


# What `worker.py` imports, without what takes long: what a step does with the device is in the file "device".
MODULES = {
    "torch.py": "import types; get_num_threads = lambda: 1; set_num_threads = set_grad_enabled = lambda value: None; "
    "_dynamo = types.SimpleNamespace(reset=lambda: None); ones = lambda *_, device: types.SimpleNamespace(item=int)",
    "clock.py": "free = lambda device: int(open('device').read() or 0)",
    "record.py": "begin = lambda: None",
}
SCRIPTS = {
    "works": "print('works in', os.getpid())",
    "raises": "1 / 0",
    "hangs": "import time; print('[gw0] FAILED tests/it.py::test_it', flush=True); time.sleep(60)",
    "dies": "os._exit(3)",
    "leaks": "open('device', 'w').write('2000000000')",
    "faults": "open('device', 'w').write('an illegal memory access')",
    "mends": "print('mends in', os.getpid()); open('device', 'w').write('0')",
}


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Makes steps that run in one process, from scripts that are told by name."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / name).write_text(text)
    for name, text in SCRIPTS.items():
        (folder / f"{name}.py").write_text(f"import os; {text}")
    (folder / "device").write_text("0")
    shutil.copy(BENCHMARKS / "worker.py", folder)
    monkeypatch.setattr(gpu, "WORKER", folder / "worker.py")
    monkeypatch.setattr(gpu, "ROOT", folder)

    def make(name: str) -> Any:
        command = [f"{name}.py", "--device", "cuda"]
        weight = 0.2 if name == "hangs" else 1.0
        return gpu.Step(name=name, command=command, process="kernels", weight=weight)

    return make


def processes(archive: Path, steps: list[str]) -> list[str]:
    """The numbers of the processes in which steps ran, as they have printed them."""
    logs = packed(archive)
    return [re.findall(r"s in (\d+)", logs[f"{step}.log"].decode())[0] for step in steps]


def test_steps_share_a_process(worker: Callable[[str], Any], tmp_path: Path) -> None:
    """One that raises leaves it to the others; one that has left the device unusable, or full, does not."""
    names = ["works", "raises", "mends"]
    assert gpu.Part("gpu-short", [worker(name) for name in names], tmp_path / "out", 0.5).run() == 2
    first, last = processes(tmp_path / "out" / "gpu-short.tar.gz", ["works", "mends"])
    assert first == last
    text = (tmp_path / "out" / "gpu-short.txt").read_text()
    assert "FAILED raises: exit code 1: ZeroDivisionError: division by zero" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        ("leaks", ""),
        ("faults", ""),
        ("dies", "FAILED dies: exit code 3"),
        ("hangs", "SKIPPED hangs: ended, its time was over"),
    ],
)
def test_a_process_that_cannot_go_on_is_replaced(
    breaks: str, said: str, worker: Callable[[str], Any], tmp_path: Path
) -> None:
    steps = [worker("works"), worker(breaks), worker("mends")]
    begin = time.monotonic()
    gpu.Part("gpu-short", steps, tmp_path / "out", 0.5).run()
    assert time.monotonic() - begin < 60 * 0.5 + 5
    first, last = processes(tmp_path / "out" / "gpu-short.tar.gz", ["works", "mends"])
    assert first != last
    assert not is_running(int(first))
    assert said in (tmp_path / "out" / "gpu-short.txt").read_text()


def test_a_process_ends_when_nobody_asks_it(worker: Callable[[str], Any], tmp_path: Path) -> None:
    """As when the command that it belongs to is killed."""
    running = gpu.Worker(tmp_path / "log", os.environ)
    running.get_ready(20)
    running.begin(worker("hangs").command, tmp_path / "hangs.log")
    running._child.stdin.close()
    try:
        assert running._child.wait(20) == 1
    finally:
        running.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_found_outlives_the_command(number: int, tmp_path: Path) -> None:
    steps = [(step.name, step.command) for step in (fake("finds", step="first-sdpa"), fake("overruns"))]
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu, signal; from pathlib import Path; "
        f"signal.signal(signal.SIGTERM, gpu._leave); gpu.PACK_S = 0.1; "
        f"steps = [gpu.Step(name=name, command=command) for name, command in {steps!r}]; "
        f"gpu.Part('gpu-rest', steps, Path({str(tmp_path)!r}), 9).run()"
    )
    command = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
    archive, until = tmp_path / "gpu-rest.tar.gz", time.monotonic() + 20
    while not archive.exists() or "child.md" not in packed(archive):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(command.pid, number)
    out, _ = command.communicate(timeout=20)
    files = packed(archive)
    sleeping = int(files["child.md"])
    assert json.loads(files["large-cuda.json"]) == LARGE
    assert "MISS first token" in (tmp_path / "gpu-rest.txt").read_text()
    if number == signal.SIGTERM:
        assert command.returncode == 128 + number
        assert "MISS first token" in out
        assert not is_running(sleeping)
    else:  # nobody can end what it started
        os.killpg(os.getpgid(sleeping), signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("attention", "MISS int4, 1 over 128k >= 2.20 of bfloat16: 0.65 (est. 2.3-2.8)"),
        ("attention", "PASS decode over 4k, GQA 8 >= 0.95 of sdpa: 0.98 (est. 1.0)"),
        ("attention", "PASS sparse 15% of 16k >= 4.00 of full prefill: 4.02 (est. 4.0)"),
        ("awq", "MISS AWQ, layer of 32B, one row >= 0.65 of the copy rate: 0.38 (1.67x fp16, est. 0.65-0.78)"),
        ("awq", "MISS AWQ, layer of 32B, 16 rows: speed >= 1.80 of fp16: 0.90 (est. 2.0-2.6)"),
        ("streaming", "PASS streamed decoding: speed >= 5.00 of cpu_offload: 20.36 (0.71 tokens/s there, est. 20)"),
        ("streaming", "MISS streaming, memory <= 1.00 of the budget: 1.07 (6.94 GB, est. 1.0)"),
    ],
)
def test_targets_are_read_from_what_was_measured(name: str, line: str) -> None:
    found = targets.verdicts(f"{name}-cuda", json.loads((RESULTS / f"{name}-cuda.json").read_text()))
    assert line in map(str, found)


def test_what_was_not_measured_is_no_verdict() -> None:
    nothing: dict[str, Any] = {key: [] for key in ("cases", "layers", "first", "next", "launches", "rows", "kinds")}
    for name in targets.TARGETS:
        assert targets.targets_of_file(f"{name}-cuda")
        assert targets.verdicts(f"{name}-cuda", nothing | {"summaries": [], "by_case": {}, "prompts": [1, 2]}) == []


def test_each_command_can_be_made() -> None:
    named: list[str] = []
    for name, steps in gpu.commands("cuda", "8b").items():
        assert len({step.name for step in steps}) == len(steps)
        named += [step.name for step in steps]
        assert sum(step.weight for step in steps) <= 60 * gpu.MINUTES[name]
        for step in steps:
            scripts = [Path(argument) for argument in step.command if argument.startswith("benchmarks/")]
            assert all((BENCHMARKS.parent / script).exists() for script in scripts)
        lines = [line for step in steps for line in map(str, targets.targets_of(step.name))]
        assert sum(len(f"SKIPPED {line}: 0.00 (est. {'x' * 20})\n") for line in lines) + gpu.REMARKS < gpu.CHARACTERS
    measured = {target.step for aims in targets.TARGETS.values() for target in aims}
    assert measured - set(named) == {"host-time"}  # which needs no GPU


@pytest.mark.slow
def test_the_short_command_runs_on_a_cpu(tmp_path: Path) -> None:
    """Its benchmarks with tiny shapes, those that are quick."""
    quick = {"link", "first-sdpa"}
    steps = [step for step in gpu.commands("cpu", "tiny")["short"] if step.name in quick]
    gpu.Part("gpu-short", steps, tmp_path, 5).run()
    text = (tmp_path / "gpu-short.txt").read_text()
    assert "FAILED" not in text
    assert "SKIPPED" not in text
    assert len(text.splitlines()) == sum(len(targets.targets_of(step.name)) for step in steps)


@pytest.mark.parametrize(
    ("script", "arguments", "asked"),
    [
        ("link", [], ["registered bytes", "pinned tensors", "queued copies", "events", "sleeps"]),
    ],
)
def test_what_only_a_gpu_does_has_run(script: str, arguments: list[str], asked: list[str], tmp_path: Path) -> None:
    """On the host, taken for a GPU that does everything at once."""
    command = [sys.executable, "-m", "tests.host_as_gpu", f"benchmarks/{script}.py", *arguments]
    command += ["--device", "cuda", "--shape", "tiny", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=BENCHMARKS.parent, env=without_interpreter(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / f"{script}-cuda.json").read_text())
    assert result["failed"] == []
    assert targets.verdicts(f"{script}-cuda", result)
    counts = json.loads(done.stdout.splitlines()[-1])
    assert all(counts.get(name, 0) > 0 for name in asked), counts


def without_interpreter() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
