"""`python -m tests.mutation`: takes guards, bounds, operators and signs out of the package, one at a time.

    python -m tests.mutation --seed 1 --count 100 --minutes 60

A first run notes which tests enter which functions; `--map FILE` keeps that for later runs. For each mutant the tests
that enter its function run, those first that enter fewest functions, on a copy of the project in a temporary folder.
They run in a fork of a session that has collected all tests: there, the function is given other code.
A mutant that no test notices is a hole, or changes nothing: close it by a test, or delete the code. The status is 1 if
there are any.
"""

import argparse
import ast
import gc
import json
import os
import pkgutil
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import coverage
import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
_NOTES = "MUTATION_NOTES"  # the variable with the file of what tests enter
_ROOMS = [f"kvboost_hf/{room}" for room in ("assisted", "attention", "cache", "offload", "server")]
_KINDS = "bloom deepseek_v3 falcon_h1 gemma2 gpt2 gpt_oss llama mistral phi qwen2 qwen3 qwen3_next".split()
# Imported once, for the forks of this process that run tests.
_LIBRARIES = [
    *("fastapi", "fsspec", "httpx", "hypothesis.stateful", "numpy", "tokenizers", "torch", "transformers.generation"),
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in _KINDS),
]
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add},
}
_ENDS = ast.Raise | ast.Return | ast.Continue | ast.Break
_OPTIONS = [
    *("-q", "--no-header", "-W", "ignore::pytest.PytestAssertRewriteWarning"),  # they are imported
    # It ends a thread, which forks do not have.
    *("--ignore", "tests/server/test_schema.py"),
]
_START_S = 60.0  # of pytest, at most, on a busy machine


Entered = dict[str, tuple[float, list[str]]]  # by test, its seconds, and the functions that it enters


class Mutant(NamedTuple):
    """One change of a file."""

    file: str  # its path in the project
    function: int  # the first line of the function around it, decorators included
    line: int
    span: tuple[int, int]  # the bytes of the file that are replaced
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.before}  ->  {self.after}"


def changes(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Expressions at a node, each with what may stand in its place."""
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            other = deepcopy(node)
            other.ops[at] = _SWAPS[type(op)]()  # type: ignore[call-overload]
            yield node, other
    elif isinstance(node, ast.BoolOp):
        yield node, ast.BoolOp(_SWAPS[type(node.op)](), node.values)  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node, node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPS and not _is_text(node):
        yield node, ast.BinOp(node.left, _SWAPS[type(node.op)](), node.right)  # type: ignore[arg-type]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        bound = ast.Name("max" if node.func.id == "min" else "min")
        yield node, ast.Call(bound, node.args, node.keywords)
    elif isinstance(node, ast.If) and isinstance(node.body[-1], _ENDS) and not node.orelse:
        yield node.test, ast.Constant(False)


def _is_text(node: ast.BinOp) -> bool:
    """Whether something is joined that has no difference: texts, bytes and lists."""
    return any(
        isinstance(side, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple)
        or (isinstance(side, ast.Constant) and not isinstance(side.value, int | float))
        for side in (node.left, node.right)
    )


def mutants_in(file: str, source: bytes) -> Iterator[Mutant]:
    """All mutants of a file's functions."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def within(node: ast.AST, function: int | None) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = _first_line(node)
            parts: list[ast.AST] = list(node.body)  # not annotations, nor defaults
        elif isinstance(node, ast.JoinedStr | ast.Assert):  # f-strings do not tell where they have what
            return
        else:
            parts = list(ast.iter_child_nodes(node))
        for old, new in changes(node):
            if function is not None and old.end_lineno is not None and old.end_col_offset is not None:
                span = starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset
                yield Mutant(file, function, old.lineno, span, ast.unparse(old), ast.unparse(new))
        for part in parts:
            yield from within(part, function)

    yield from within(ast.parse(source), None)


# What tests enter: this module is a plugin of the first run


class Notes:
    """Notes which functions of the rooms each test enters, and how long it keeps the processor."""

    def __init__(self) -> None:
        self._seconds = dict[str, float]()  # of each test that has passed
        self._took = 0.0  # seconds, of the test that ran last
        rooms = [f"{ROOT / room}/*" for room in _ROOMS]
        self._lines = coverage.Coverage(data_file=None, config_file=False, include=rooms)
        self._lines.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """What is run from here on is run by this test, in whatever thread."""
        self._lines.switch_context(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Measures that: on a busy machine, time by the clock would leave few tests for a mutant."""
        began = time.process_time()
        try:
            yield
        finally:
            self._took = time.process_time() - began

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps what has passed."""
        if report.when == "call" and report.passed:
            self._seconds[report.nodeid] = self._took

    def pytest_sessionfinish(self) -> None:
        """Writes it."""
        self._lines.stop()
        data, entered = self._lines.get_data(), defaultdict[str, set[str]](set)
        for name in data.measured_files():
            file = str(Path(name).relative_to(ROOT))
            around = functions_around(Path(name).read_bytes())
            for line, tests in data.contexts_by_lineno(name).items():
                for test in tests if line in around else ():
                    entered[test].add(f"{file}:{around[line]}")
        noted = {test: (seconds, sorted(entered[test])) for test, seconds in self._seconds.items()}
        Path(os.environ[_NOTES]).write_text(json.dumps(noted))


def functions_around(source: bytes) -> dict[int, int]:
    """The first line of the innermost function around each line of its body, as `Mutant.function` has it."""
    found = dict[int, int]()
    for node in ast.walk(ast.parse(source)):  # outer ones first
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= dict.fromkeys(range(node.body[0].lineno, node.body[-1].end_lineno + 1), _first_line(node))
    return found


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The first line of a function, decorators included."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def pytest_configure(config: pytest.Config) -> None:
    """Watch where the notes are wanted."""
    if _NOTES in os.environ:
        config.pluginmanager.register(Notes())


def import_project(folder: Path) -> None:
    """Import the package of a folder, as far as it can be imported here."""
    sys.path[:] = [str(folder), *(place for place in sys.path if place not in ("", str(ROOT)))]
    package = import_module("kvboost_hf")
    for found in pkgutil.walk_packages(package.__path__, "kvboost_hf.", onerror=lambda name: None):
        if not found.name.endswith("__main__"):
            with suppress(ImportError):
                import_module(found.name)


class Judge:
    """Judges mutants in one session of pytest: after it has collected, each mutant gets a fork that runs its tests.

    Args:
        folder: The copy of the project.
        mutants: To be judged, in order.
        notes: What tests enter, and how long they take.
        minutes: No mutant is begun later.
        seconds: How long the tests of one mutant may keep the processor.
        output: The descriptor to write to; pytest has its own.
    """

    def __init__(
        self,
        folder: Path,
        mutants: list[Mutant],
        notes: Entered,
        minutes: float,
        seconds: float,
        output: int,
    ) -> None:
        self._folder, self._mutants, self._notes, self._output = folder, mutants, notes, output
        self._minutes, self._seconds = minutes, seconds
        self._functions: dict[str, list[FunctionType]] = defaultdict(list)  # by file, wherever they are kept
        self.counts: dict[str, int] = defaultdict(int)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Judge all mutants in place of running all tests."""
        gc.unfreeze()  # tests/conftest.py froze them, and what is frozen is not listed
        for each in gc.get_objects():
            # Not isinstance(), which asks the object.
            if type(each) is FunctionType and each.__code__.co_filename.startswith(f"{self._folder}/kvboost_hf"):
                self._functions[each.__code__.co_filename].append(each)
        gc.freeze()
        items, begun = {item.nodeid: item for item in session.items}, time.monotonic()
        for mutant in self._mutants:
            if time.monotonic() - begun > self._minutes * 60:
                break
            outcome = self._outcome(mutant, session, items)
            self.counts[outcome] += 1
            self._say(f"{outcome:<12} {mutant}")
        self._say(", ".join(f"{number} {outcome}" for outcome, number in sorted(self.counts.items())))
        if self.counts["noticed"] + self.counts["timed out"] < sum(self.counts.values()):
            session.testsfailed = 1
        return True

    def _say(self, line: str) -> None:
        os.write(self._output, f"{line}\n".encode())

    def _outcome(self, mutant: Mutant, session: pytest.Session, items: dict[str, pytest.Item]) -> str:
        """`noticed`, `timed out`, `NOT NOTICED`, or `not entered` by any test."""
        named, seconds = tests_of(mutant, self._notes, self._seconds)
        chosen = [items[name] for name in named if name in items]
        if not chosen:
            return "unknown: delete the map" if named else "not entered"
        path = self._folder / mutant.file
        source = path.read_bytes()
        begin, end = mutant.span
        lines = "\n" * source.count(b"\n", begin, end)  # what is behind stays where it is
        path.write_bytes(source[:begin] + f"({mutant.after}{lines})".encode() + source[end:])
        try:
            status = in_fork(lambda: self._run(path, session, chosen), _START_S + 5 * seconds)
        finally:
            path.write_bytes(source)
        return {0: "NOT NOTICED", None: "timed out"}.get(status, "noticed")

    def _run(self, path: Path, session: pytest.Session, chosen: list[pytest.Item]) -> int:
        """Run tests on what the file holds now, until one fails; returns 1 if one does."""
        if path.parent.name == "triton" or not self._exchange(path):  # Triton reads files itself
            command = [sys.executable, "-m", "pytest", "-x", *_OPTIONS, *(item.nodeid for item in chosen)]
            os.execv(sys.executable, command)
        for item, later in zip(chosen, [*chosen[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=later)
            if session.testsfailed:
                return 1
        return 0

    def _exchange(self, path: Path) -> int:
        """Give all functions of a file the code that it has now; returns how many got another."""
        codes = [compile(path.read_bytes(), str(path), "exec")]
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        now = {(code.co_qualname, code.co_firstlineno): code for code in codes}
        found = 0
        for each in self._functions[str(path)]:
            code = now.get((each.__code__.co_qualname, each.__code__.co_firstlineno), each.__code__)
            if code != each.__code__ and len(code.co_freevars) == len(each.__code__.co_freevars):
                each.__code__ = code
                found += 1
        return found


def in_fork(work: Callable[[], int], timeout_s: float | None) -> int | None:
    """The status that `work` gives in a fork of this process; None if it took longer."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status: int = pytest.ExitCode.INTERNAL_ERROR
        try:
            os.setsid()
            status = work()
        finally:
            os._exit(status)
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    try:
        while (waited := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # such as a server, which a test that failed has not stopped
    return os.waitstatus_to_exitcode(waited[1])


def run_pytest(folder: Path, arguments: list[str], plugins: Sequence[object] = ()) -> int:
    """Run pytest in a folder; its output goes to a file there."""
    log = os.open(folder / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for output in (1, 2):
        os.dup2(log, output)
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    some = [phase for phase in hypothesis.Phase if phase.name in ("explicit", "reuse", "generate")]
    hypothesis.settings.register_profile("mutation", phases=some)  # whoever fails is not made smaller
    hypothesis.settings.load_profile("mutation")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    try:
        return pytest.main([*_OPTIONS, "-m", "not gpu and not nightly", *arguments], list(plugins))
    finally:
        sys.stdout.flush()


def copy_into(folder: Path) -> None:
    """The project as git knows it, in a folder, and the environment beside it."""
    told = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(told, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    for name in (".venv", ".models"):
        if (ROOT / name).exists():
            (folder / name).symlink_to((ROOT / name).resolve())


def tests_of(mutant: Mutant, notes: Entered, most: float) -> tuple[list[str], float]:
    """Tests that enter a mutant's function, the most special ones first, up to `most` seconds, and their seconds."""
    place = f"{mutant.file}:{mutant.function}"
    chosen, seconds = list[str](), 0.0
    for name, (duration, names) in sorted(notes.items(), key=lambda noted: len(noted[1][1])):
        if place in names and (not chosen or seconds + duration <= most):
            chosen.append(name)
            seconds += duration
    return chosen, seconds


def main() -> int:
    """Make mutants, and say of each whether it was noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    parser.add_argument("--count", type=int, default=10, help="how many mutants")
    parser.add_argument("--minutes", type=float, default=30.0, help="no mutant is begun later, the first run left out")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the processor, for the tests of one mutant")
    parser.add_argument("--rooms", nargs="+", default=_ROOMS, help="folders of the package, within these")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="where tests are looked for")
    parser.add_argument("--map", type=Path, help="a file with what tests enter; it is made if it is missing")
    args = parser.parse_args()
    say = sys.stdout.write
    # Before libraries are imported: as tests/conftest.py does, and since forks do not have the threads of a pool.
    os.environ |= {"TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "1"), "OMP_NUM_THREADS": "1"}
    for name in _LIBRARIES:
        import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutation-") as made:
        folder = Path(made).resolve()
        copy_into(folder)
        import_project(folder)
        map_file = (args.map or folder / "map.json").resolve()
        if not map_file.exists():
            os.environ[_NOTES] = str(map_file)
            in_fork(lambda: run_pytest(folder, ["-p", "tests.mutation", "--maxfail=1000", *args.tests]), None)
            del os.environ[_NOTES]
            say((folder / "pytest.log").read_text()[-2000:])
        notes = json.loads(map_file.read_text())
        say(f"{len(notes)} tests are known.\n")
        files = sorted(str(path.relative_to(ROOT)) for room in args.rooms for path in (ROOT / room).rglob("*.py"))
        possible = [mutant for file in files for mutant in mutants_in(file, (folder / file).read_bytes())]
        random.Random(args.seed).shuffle(possible)
        judge = Judge(folder, possible[: args.count], notes, args.minutes, args.seconds, os.dup(1))
        status = in_fork(lambda: run_pytest(folder, args.tests, [judge]), None)
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            say((folder / "pytest.log").read_text()[-2000:])
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
