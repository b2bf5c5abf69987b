"""All that needs a GPU, in two commands: `make gpu-short` takes at most ten minutes, `make gpu-rest` what is left.

    python benchmarks/gpu.py short --out OUT [--minutes 9.3] [--device cuda] [--shape 8b]

What matters most comes first. The steps of a command share its minutes by weight: the seconds that each is expected to
take. What one leaves belongs to those after it. A step is told how many minutes it has, writes what it finds as it
comes, and is ended when they are over; the others run all the same. Most steps run in one of two processes, kernels in
one and models in the other, so that imports are paid once; one that had to be ended, or that has left the device
unusable, is replaced by a new one. While steps run, all that they have written is kept in one archive,
OUT/gpu-COMMAND.tar.gz, and the lines below in OUT/gpu-COMMAND.txt: a command that is killed leaves both.

The last lines are one for each step that failed or had no time, and one for each target of `targets.py`: PASS or MISS
with what was found and what is expected, else FAILED or SKIPPED. They are bounded. The exit code is 2 if something
failed, 1 if a target was missed or something was left out for want of time, else 0. Another device than a GPU, and a
tiny shape, try all this in minutes.
"""

import argparse
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import FrameType

from targets import Target, targets_of, targets_of_file, verdicts

ROOT = Path(__file__).parents[1]
KEPT_LOG_BYTES, MOST_LOG_BYTES = 200_000, 50_000_000  # in the archive; of a step, which is ended if it prints more
LINE = 160  # characters
CHARACTERS, REMARKS = 10_000, 2500  # of all that a command says at its end, and of what failed or was left out
PACK_S, END_S = 2.0, 4.0  # between archives; that a step has to end by itself
START_S = 90.0  # that a process may take for its imports before a step of it has to do with what is left of its time
TOLD = 0.9  # of the time that it has, so that a step ends by itself
WORKER = ROOT / "benchmarks" / "worker.py"
SANITIZED = "test_pieces or test_codes or test_parity"  # kernels that compute-sanitizer looks at
MINUTES = {"short": 9.3, "rest": 18.0}
STREAMED = ("--model", "Qwen2.5-32B", "--layers", "12", "--budget", "3.5GB")  # nine of twelve layers are streamed
PROFILED = ("--ways", "live", "DynamicCache", "max_cache_len")
KERNEL_TESTS = (  # of codes, pieces, AWQ and launches
    *(
        f"tests/gpu/test_attention_cuda.py::test_{name}"
        for name in ("pieces", "codes", "a_kernel_that_is_launched_again_says_the_same", "it_is_the_triton_tier")
    ),
    "tests/gpu/test_awq_cuda.py",
)
MOST_REMARKS = 6  # of a step
LEAST_S = 3.0  # a step that has less is left out
ENDING = (signal.SIGTERM, signal.SIGHUP)  # how a command is ended from outside
OVER, NO_TIME = "ended, its time was over", "no time is left for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command, and the targets that it measures.

    Args:
        name: The name of the step and its log; `targets.py` has its targets under this name.
        command: The arguments of the command; `{out}` and `{minutes}` stand for its folder and its time.
        weight: The step's share of the time: the seconds that it is expected to take.
        process: The process that runs it, with others; by default it has its own. Then the command is a script of
            Python with its arguments.
        judged: Whether it is of tests, which are a target: some have to pass, and none to fail.
    """

    name: str
    command: Sequence[str]
    weight: float = 1.0
    process: str = ""
    judged: bool = False


@dataclass(slots=True)
class Outcome:
    """What has come of a step.

    Args:
        why: Why it was ended or left out; empty if it has ended by itself.
        failed: Whether something of it failed, rather than having no time.
        remarks: Lines on what failed.
        tests: What its tests say of themselves, and whether they pass; None if it has none.
    """

    why: str = ""
    failed: bool = False
    remarks: list[str] = field(default_factory=list)
    tests: tuple[bool, str] | None = None


class Own:
    """A step in a process of its own."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with log.open("wb") as written:
            self._child = subprocess.Popen(
                command, stdout=written, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, process_group=0
            )

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None if it has not ended in this time."""
        try:
            return self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End it, whatever it does."""
        _end(self._child)


class Worker:
    """A process that runs one step after another: `worker.py`."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        with log.open("ab") as written:
            self._child = subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                cwd=ROOT,
                env=environment,
                process_group=0,
                bufsize=0,
            )
        self._is_ready = False

    def get_ready(self, seconds: float) -> None:
        """Wait until it has imported what benchmarks need, or for so long."""
        if not self._is_ready:
            self._is_ready = self._answer(seconds) is not None

    @property
    def is_alive(self) -> bool:
        """Whether it can run another step."""
        return self._child.poll() is None

    def begin(self, command: Sequence[str], log: Path) -> None:
        """Run a step."""
        log.touch()
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # wait() says so
            self._child.stdin.write(json.dumps({"command": list(command), "log": str(log)}).encode() + b"\n")

    def wait(self, seconds: float) -> int | None:
        """The exit code of the step, or None if it has not ended in this time."""
        begin = time.monotonic()
        self.get_ready(seconds)
        answer = self._answer(max(0.0, begin + seconds - time.monotonic())) if self._is_ready else None
        if answer is None:
            return None
        if not answer:  # it has ended
            return self._child.wait(END_S) or 1
        said = json.loads(answer)
        if said["ends"]:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(END_S)
            self.end()
        code: int = said["code"]
        return code

    def _answer(self, seconds: float) -> bytes | None:
        """A line that it writes, or nothing if it has ended; None if there is neither in this time."""
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], max(0.0, seconds))[0]:
            return None
        return self._child.stdout.readline()

    def end(self) -> None:
        """End it, whatever it does."""
        _end(self._child)
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()


@dataclass(slots=True)
class Part:
    """What one command runs, and what has come of it.

    Args:
        name: The name of its files.
        steps: In order.
        out: Where the archive and the lines go.
        minutes: For all of it.
        characters: The most characters of its last output.
    """

    name: str
    steps: Sequence[Step]
    out: Path
    minutes: float
    characters: int = CHARACTERS
    _outcomes: dict[str, Outcome] = field(default_factory=dict)  # of steps that have ended
    _workers: dict[str, Worker] = field(default_factory=dict)
    _packed: object = None

    def run(self) -> int:
        """Run it; returns the exit code."""
        self.out.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + 60 * self.minutes - min(PACK_S, 6 * self.minutes)
        folder = Path(tempfile.mkdtemp(prefix="kvboost-gpu-"))
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell's background jobs begin, and steps would
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            for name in dict.fromkeys(step.process for step in self.steps if step.process):
                self._worker(name, folder)  # which imports meanwhile
            for at, step in enumerate(self.steps):
                if step.process:  # its imports are nobody's time
                    self._worker(step.process, folder).get_ready(min(START_S, end - time.monotonic()))
                left = end - time.monotonic()
                share = left * step.weight / sum(each.weight for each in self.steps[at:])
                if share < LEAST_S * min(1.0, self.minutes):
                    self._outcomes[step.name] = Outcome(NO_TIME)
                else:
                    self._run(step, folder, share)
        finally:  # if it is ended from outside, too
            for worker in self._workers.values():
                worker.end()
            lines = self._pack(folder)
            shutil.rmtree(folder, ignore_errors=True)
            print("".join(f"{line}\n" for line in lines), end="", flush=True)
        kinds = {line.partition(" ")[0] for line in lines}
        return 2 if "FAILED" in kinds else 1 if kinds & {"MISS", "SKIPPED"} else 0

    def _environment(self, scratch: Path) -> dict[str, str]:
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(ROOT), *([before] if before else [])])
        scratch.mkdir(exist_ok=True)
        return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch)}

    def _worker(self, name: str, folder: Path) -> Worker:
        """The process of this name, a new one if there is none that lives."""
        if name in self._workers and not self._workers[name].is_alive:
            self._workers.pop(name).end()
        if name not in self._workers:
            self._workers[name] = Worker(folder / f"process-{name}.log", self._environment(folder / f"of-{name}"))
        return self._workers[name]

    def _run(self, step: Step, folder: Path, seconds: float) -> None:
        log, scratch = folder / f"{step.name}.log", folder / f"of-{step.process or step.name}"
        told = {"{out}": str(folder), "{minutes}": f"{TOLD * seconds / 60:.3f}"}
        command = [_filled(argument, told) for argument in step.command]
        begin = time.monotonic()
        running: Own | Worker
        if step.process:
            running = self._worker(step.process, folder)
            running.begin(command, log)
        else:
            running = Own(command, log, self._environment(scratch))
        code, why = None, "ended from outside"
        try:
            code, why = self._wait(running, folder, log, begin + seconds)
        finally:
            if why or not step.process:
                running.end()
                shutil.rmtree(scratch, ignore_errors=True)
            took = f"{time.monotonic() - begin:.0f} s"
            outcome = Outcome(f"{why}, after {took}" if why else "")
            outcome.remarks = _failed_tests(log)
            outcome.failed = bool(code or outcome.remarks or (why and why != OVER))
            if code and not outcome.remarks:
                outcome.remarks = [f"exit code {code}: {_last_line(log)}"]
            if step.judged:  # tests that were all skipped have shown nothing
                said = why or _last_line(log)
                outcome.tests = code == 0 and " passed" in said, said
            self._outcomes[step.name] = outcome
            print(f"{step.name}: {why or f'exit code {code}'}, {took}"[:LINE], flush=True)

    def _wait(self, running: Own | Worker, folder: Path, log: Path, until: float) -> tuple[int | None, str]:
        """Wait for a step, and pack what it writes; returns its exit code, or why it has to be ended."""
        while True:
            code = running.wait(max(0.0, min(PACK_S, until - time.monotonic())))
            if code is not None:
                return code, ""
            self._pack(folder)
            if time.monotonic() >= until:
                return None, OVER
            if log.stat().st_size > MOST_LOG_BYTES:
                return None, f"ended, it had printed more than {MOST_LOG_BYTES // 10**6} MB"

    def _pack(self, folder: Path) -> list[str]:
        """Write the archive and the lines, if there is something new; returns the lines."""
        files = sorted(path for path in folder.iterdir() if path.is_file())
        lines = self._lines([path for path in files if path.suffix == ".json"])
        state = lines, [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        if state != self._packed:
            archive, partial = (self.out / f"{self.name}.{end}" for end in ("tar.gz", "partial"))
            with tarfile.open(partial, "w:gz") as packed:
                for path in files:
                    _add(packed, f"{self.name}/{path.name}", _tail(path, KEPT_LOG_BYTES, path.suffix == ".log"))
            partial.replace(archive)
            (self.out / f"{self.name}.txt").write_text("".join(f"{line}\n" for line in lines))
            self._packed = state
        return lines

    def _lines(self, results: Sequence[Path]) -> list[str]:
        """What is said at the end: what failed or was left out, and then each target."""
        remarks: list[str] = []
        for step in self.steps:
            outcome = self._of(step)
            remarks += [f"FAILED {step.name}: {each}" for each in outcome.remarks[:MOST_REMARKS]]
            if (more := len(outcome.remarks) - MOST_REMARKS) > 0:
                remarks.append(f"FAILED {step.name}: {more} more, in {self.name}.tar.gz")
            if outcome.why:
                late = outcome.why.startswith((OVER, NO_TIME))
                remarks.append(f"{'SKIPPED' if late else 'FAILED'} {step.name}: {outcome.why}")
        found: dict[Target, str] = {}
        faulty: set[Target] = set()  # something has failed in their file
        for path in results:
            for kind, line in _found(path):
                if isinstance(kind, Target):
                    found[kind] = line
                else:
                    remarks.append(f"{kind} {line}")
                    faulty |= set(targets_of_file(path.stem)) if kind == "FAILED" else set()
        targets: list[str] = []
        for step in self.steps:
            outcome = self._of(step)
            if outcome.tests is not None:
                passes, said = outcome.tests
                targets.append(f"{'PASS' if passes else 'MISS'} {step.name}: {said}")
            late = not outcome.failed and bool(outcome.why or step.name not in self._outcomes)
            for target in targets_of(step.name):
                missing = "FAILED" if outcome.failed or (target in faulty and not late) else "SKIPPED"
                targets.append(found.get(target, f"{missing} {target}"))
        shown = _fitting(remarks, min(REMARKS, self.characters // 3), self.name)
        room = self.characters - sum(len(line) + 1 for line in shown)
        return [*shown, *_fitting(targets, room, self.name)]

    def _of(self, step: Step) -> Outcome:
        return self._outcomes.get(step.name, Outcome())


def _fitting(lines: Sequence[str], characters: int, name: str) -> list[str]:
    """As many lines as there is room for, and how many more there are."""
    shown: list[str] = []
    for line in lines:
        cut = line[:LINE]
        characters -= len(cut) + 1
        if characters < LINE // 3:  # room for a line that counts the others
            kinds = "FAILED" if any(each.startswith("FAILED") for each in lines[len(shown) :]) else "SKIPPED"
            return [*shown, f"{kinds} {len(lines) - len(shown)} more, in {name}.tar.gz"]
        shown.append(cut)
    return shown


def _filled(argument: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        argument = argument.replace(name, value)
    return argument


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a step with all processes that it has started: first as Control-C does, so that tests say what failed."""
    child.send_signal(signal.SIGINT)
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        try:
            if number is not None:
                os.killpg(child.pid, number)
            child.wait(END_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _tail(path: Path, most: int, cut: bool) -> bytes:
    """What a file holds, or the end of it."""
    with path.open("rb") as file:
        if cut:
            file.seek(max(0, path.stat().st_size - most))
        return file.read()


def _add(packed: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(content), int(time.time())
    packed.addfile(member, BytesIO(content))


def _log_lines(log: Path) -> list[str]:
    return [
        line for line in _tail(log, KEPT_LOG_BYTES, cut=True).decode(errors="replace").splitlines() if line.strip()
    ]


def _last_line(log: Path) -> str:
    return next(reversed(_log_lines(log)), "nothing printed").strip("= ")


def _failed_tests(log: Path) -> list[str]:
    """The failed tests of pytest's summary; before there is one, those that it has named so far."""
    lines = _log_lines(log)
    summary = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return summary or [found[1] for line in lines if (found := re.match(r"\[gw\d+\] .*((FAILED|ERROR) .*\S)", line))]


def _found(path: Path) -> Iterator[tuple[str | Target, str]]:
    """What the JSON of a benchmark says of its targets, and of cases that failed or were left out."""
    try:
        result = json.loads(path.read_text())
        for verdict in verdicts(path.stem, result):
            yield verdict.target, str(verdict)
        for kind in ("failed", "skipped"):
            cases = result.get(kind, [])
            for case in cases.items() if isinstance(cases, dict) else cases:
                yield kind.upper(), f"{path.stem}: {case}"
        for row in result["cases"] if path.stem.startswith("attention") else ():
            if "kvboost_fa2" in row["failed"]:  # the ways of others may not run here
                yield "FAILED", f"{path.stem}: {row['name']}: {row['failed']['kvboost_fa2']}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # cut short, or not of a benchmark
        yield "FAILED", f"{path.name} cannot be read: {type(error).__name__}: {error}"


def commands(device: str, shape: str) -> dict[str, list[Step]]:
    """The steps of each command, most valuable first, with the seconds that each is expected to take.

    Args:
        device: Where models run.
        shape: The shape of models; see `shapes.py`.
    """
    python, workers = sys.executable, str(min(8, os.cpu_count() or 1))
    base = ("--device", device, "--shape", shape, "--out", "{out}", "--minutes", "{minutes}")

    def kernels(name: str, seconds: float, script: str, *arguments: str, rounds: int = 3) -> Step:
        command = [f"benchmarks/{script}.py", *arguments, *base, "--rounds", str(rounds), "--add"]
        return Step(name=name, command=command, weight=seconds, process="kernels")

    def product(name: str, seconds: float, script: str, *arguments: str, rounds: int = 2) -> Step:
        end = ("--rounds", str(rounds)) if script != "speculation" else ("--texts", "1", "--tokens", "64")
        command = [f"benchmarks/{script}.py", *arguments, *base, *end, "--add"]
        return Step(name=name, command=command, weight=seconds, process="product")

    def large(name: str, seconds: float, attention: str, length: str, *kinds: str, rounds: int = 2) -> Step:
        which = ("--attentions", attention, "--lengths", length, "--only", *kinds, "--no-peer")
        return product(name, seconds, "large", *which, rounds=rounds)

    def tests(name: str, seconds: float, *chosen: str) -> Step:
        command = [python, "-m", "pytest", "-v", "--tb=line", "-rfE", "-W", "default", "-n", workers]
        command += ["-m", "gpu"] if device == "cuda" else ["-m", "not gpu", "-x"]
        return Step(name=name, command=[*command, *chosen], weight=seconds, judged=True)

    def workload(name: str) -> Step:
        command = [python, "-m", "kvboost_hf", "bench", "--workloads", name, "--device", device]
        command += ["--prompts", "4", "--repeats", "1", "--max-new-tokens", "8"]  # it writes nothing before its end
        command += ["--random", {"tiny": "2x128", "small": "8x512", "8b": "32x4096"}[shape]]
        command += ["--dtype", "float32" if device == "cpu" else "bfloat16"]
        command += ["--arms", "exact", "exact-store", "blend-query", "kvboost_fa2"]
        command += ["--peers", "hf-kept", "hf-deepcopy", "hf-offloaded", "hf-batching"]
        command += ["--json", f"{{out}}/bench-{name}-{device}.json"]
        return Step(name=f"bench-{name}", command=command, weight=90)

    checked = [f"tests/gpu/test_attention{which}_cuda.py" for which in ("", "_nvrtc")]
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9", python, "-m", "pytest", "-v", "--tb=line", "-rfE"]
    sanitizer += ["-m", "gpu", "-W", "default", "-x", "-k", SANITIZED, *checked]
    sanitized = Step(name="sanitizer", command=sanitizer, weight=60, judged=True)
    return {
        "short": [
            kernels("link", 15, "link"),
            tests("tests of kernels", 70, *KERNEL_TESTS),
            kernels("codes", 27, "attention", "--only", "coded:int8,int4,turboquant 4"),
            kernels("pieces", 23, "attention", "--only", "table"),
            kernels("decode", 15, "attention", "--only", "decode"),
            kernels("awq", 70, "awq", "--models", "32B", "--rows", "1", "4", "16", "64", "256", "1024"),
            large("first-sdpa", 16, "sdpa", "short", "first"),
            large("next-sdpa", 38, "sdpa", "short", "next", "graphs"),
            large("first-kvboost", 18, "kvboost_fa2", "short", "first"),
            large("next-kvboost", 38, "kvboost_fa2", "short", "next", "graphs"),
            product("streaming", 100, "streaming", *STREAMED, "--only", "ours", "whole layers"),
            product("riding", 15, "repair", "ttft", "--ways", "riding", rounds=1),
            large("first-graph", 40, "sdpa", "short", "suffixes"),
            product("profile", 30, "large", "--attentions", "sdpa", "kvboost_fa2", "--only", "launches", *PROFILED),
            tests("other tests", 42, "tests/gpu", *(f"--deselect={each}" for each in KERNEL_TESTS)),
        ],
        "rest": [
            kernels("prompts", 60, "attention", "--only", "square", "suffix", "sparse", "tree", "new_lengths"),
            kernels("awq-70B", 60, "awq", "--rows", "1", "4096"),
            product("streaming-peer", 90, "streaming", *STREAMED, "--only", "ours", "cpu_offload", "resident"),
            product("large", 240, "large"),
            product("repair", 60, "repair", "ttft"),
            product("tiers", 60, "tiers"),
            product("speculation", 90, "speculation"),
            product("server_shared", 60, "server_shared"),
            *map(workload, ("chat", "rag")),
            product("kinds", 30, "kinds"),
            *([sanitized] if shutil.which(sanitizer[0]) else []),
            kernels("other codes", 15, "attention", "--only", "coded:turboquant 3,turboquant 2"),
            product("attention_models", 15, "attention_models"),
            product("reuse", 20, "reuse"),
            kernels("awq-tilings", 30, "awq", "--tilings"),
        ],
    }


def _leave(number: int, _frame: FrameType | None) -> None:
    for each in ENDING:  # a second one would cut short what is done at the end
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=MINUTES)
    parser.add_argument("--out", type=Path, required=True, help="folder for the archive and the lines")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="8b", choices=("tiny", "small", "8b"))
    parser.add_argument("--minutes", type=float, help=f"for all of it; {MINUTES['short']} and {MINUTES['rest']}")
    options = parser.parse_args()
    for number in ENDING:
        signal.signal(number, _leave)
    steps = commands(options.device, options.shape)[options.command]
    minutes = options.minutes or MINUTES[options.command]
    return Part(f"gpu-{options.command}", steps, options.out.absolute(), minutes).run()


if __name__ == "__main__":
    sys.exit(main())
