"""Every Python example in README and docs runs, every command parses, and every link leads somewhere."""

import re
import runpy
import shlex
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, name_of
from tests.internals.cli import command_line

# Blocks that say that they cannot run here. A new one has to be counted.
NOT_RUN = {
    "docs/recipes/mac.md": 1,
    "docs/recipes/pipelines.md": 2,
    "docs/scaling.md": 2,
    "docs/scoring.md": 1,
    "docs/server.md": 1,
}
FLAG = re.compile(r"--[a-z][a-z-]+")

by_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@by_page
def test_examples_run(
    page: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    loading_is_worth_it: None,
) -> None:
    text = page.read_text(encoding="utf-8")
    if "KVBOOST_URL" in text:
        monkeypatch.setenv("KVBOOST_URL", request.getfixturevalue("server_url"))
    if "langchain_openai" in text:
        pytest.importorskip("langchain_openai", reason="pip install 'kvboost_hf[clients]'")
    if "from anthropic import" in text:
        pytest.importorskip("anthropic", reason="pip install 'kvboost_hf[clients]'")
    if "from trl import" in text:
        pytest.importorskip("trl", reason="the extra `trl`")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks(text):
        if block.language == "python" and block.reason is None:
            # As many empty lines before it as the page has, so that a traceback names the page's line.
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)


def test_the_first_example_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(blocks((ROOT / "README.md").read_text(encoding="utf-8")))
    first = next(number for number, block in enumerate(found) if block.language == "python")
    example, shown = found[first : first + 2]
    exec(compile(example.text, "README.md", "exec"), {})
    assert capsys.readouterr().out == shown.text


def test_what_does_not_run_is_counted() -> None:
    found = {name_of(page): [block.reason for block in blocks(page.read_text(encoding="utf-8"))] for page in PAGES}
    counts = {name: sum(reason is not None for reason in reasons) for name, reasons in found.items()}
    assert {name: count for name, count in counts.items() if count} == NOT_RUN


@pytest.mark.daily
@pytest.mark.parametrize("name", NOT_RUN)
def test_what_does_not_run_imports_what_there_is(name: str) -> None:
    for block in blocks((ROOT / name).read_text(encoding="utf-8")):
        if block.reason is not None:
            compile(block.text, name, "exec")
            for module, names in re.findall(r"^from (kvboost_hf\S*) import (.*)$", block.text, flags=re.MULTILINE):
                spec = find_spec(
                    {"kvboost_hf": "kvboost_hf.public"}.get(module, module)
                )  # which may need what is not here
                assert spec is not None
                assert spec.origin is not None
                source = Path(spec.origin).read_text(encoding="utf-8")
                assert all(re.search(rf"\b{one}\b", source) for one in names.split(", "))


@pytest.mark.daily
@by_page
def test_languages_are_those_that_tests_know(page: Path) -> None:
    assert {block.language for block in blocks(page.read_text(encoding="utf-8"))} <= {"", "python"}


@pytest.mark.daily
@by_page
def test_commands_parse(page: Path) -> None:
    for command in commands(page.read_text(encoding="utf-8")):
        command_line().parse_args(command)


@pytest.mark.daily
@by_page
def test_commands_in_sentences_have_these_flags(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, rest in re.findall(r"`kvboost-hf\s+([a-z]+)([^`]*)`", page.read_text(encoding="utf-8")):
        with pytest.raises(SystemExit, match="0"):
            command_line().parse_args([command, "--help"])
        assert set(FLAG.findall(rest)) <= set(FLAG.findall(capsys.readouterr().out)), f"{command} {rest}"


@pytest.mark.daily
@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_blocks_are_found_in_order() -> None:
    text = "a\n\n```python\nx = 1\n```\n\n<!-- not run: needs a GPU -->\n```python\ny = 2\n```\n\n```\nmake\n```\n"
    assert [(one.language, one.text, one.reason, one.line) for one in blocks(text)] == [
        ("python", "x = 1\n", None, 4),
        ("python", "y = 2\n", "needs a GPU", 9),
        ("", "make\n", None, 13),
    ]


@pytest.mark.daily
@pytest.mark.parametrize("flag", ["--no-such-flag", "--port x"])
def test_a_wrong_command_would_be_noticed(flag: str) -> None:
    [command] = commands(f"```\nkvboost-hf serve \\\n  {flag}  # a server\n```\n")
    with pytest.raises(SystemExit, match="2"):
        command_line().parse_args(command)


def commands(text: str) -> list[list[str]]:
    """Arguments of each `kvboost-hf` in blocks for a shell."""
    shell = [one.text.replace("\\\n", " ") for one in blocks(text) if one.language in ("", "sh", "bash", "console")]
    lines = [shlex.split(line, comments=True) for block in shell for line in block.splitlines() if "kvboost-" in line]
    found = [line[1:] for line in lines if line[:1] == ["kvboost-hf"]]
    return found + [["serve", *line[1:]] for line in lines if line[:1] == ["kvboost-server"]]


def paragraphs(text: str) -> list[str]:
    """What stands between empty lines, and rows of tables alone."""
    return [part for part in re.split(r"\n\s*\n|\n(?=\|)", text) if part.strip()]


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])


def test_extras_that_are_named_exist() -> None:
    code = [path for folder in ("kvboost_hf", "tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    named = re.compile(r"(?:kvboost(?:_hf)?|'\.|\"\.)\[([a-z][a-z0-9-]*)\]")
    found = {name for path in [*PAGES, *code] for name in named.findall(path.read_text("utf-8"))}
    assert {"server", "cuda", "streaming", "demo"} <= found <= extras()


@pytest.mark.daily
@by_page
def test_what_is_not_released_yet_is_not_said_to_be(page: Path) -> None:
    """From an index, the package can be installed once it is there: pages say so, and what works in a clone."""
    for part in paragraphs(page.read_text("utf-8")):
        if re.search(r"pip install [^\n]*kvboost_hf", part):
            assert "nce released" in part, part
            assert "pip install ." in part or "pip install '." in part, part


def test_make_demo_takes_a_model() -> None:
    for given, wanted in (((), "demo --figure"), (("MODEL=acme/reader",), "demo --model acme/reader --figure")):
        shown = subprocess.run(["make", "-n", "demo", *given], cwd=ROOT, capture_output=True, text=True, check=True)
        assert wanted in shown.stdout


def test_the_table_of_what_fits_is_what_the_code_says() -> None:
    table = runpy.run_path(str(ROOT / "benchmarks" / "what_fits.py"))["table"]()
    assert table in (ROOT / "docs" / "streaming.md").read_text(encoding="utf-8")


def test_the_tables_of_simulated_passes_are_what_the_code_says() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "ring.py"))
    page = (ROOT / "benchmarks" / "results" / "ring.md").read_text(encoding="utf-8")
    assert script["staying"]() in page
    assert script["rounding"]() in page
    assert script["hosts"]() in page


def test_the_page_of_flags_is_what_the_parser_says() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "flags.py"))["page"]()
    written = ROOT / "docs" / "flags.md"
    assert written.read_text(encoding="utf-8") == page, f"run python docs/flags.py > {written.relative_to(ROOT)}"


def test_the_page_of_fields_is_what_the_schemas_say() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "server_fields.py"))["page"]()
    written = ROOT / "docs" / "server-fields.md"
    told = f"run python docs/server_fields.py > {written.relative_to(ROOT)}"
    assert written.read_text(encoding="utf-8") == page, told


def test_the_page_of_files_has_each_of_them() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "files.py"))["page"]()
    files = [file.name for file in (ROOT / "kvboost_hf").rglob("*.py") if not file.name.startswith("__")]
    assert sorted(re.findall(r"^- `(\w+\.py)`: \S", page, re.MULTILINE)) == sorted(files)


def test_design_names_files_that_are_there() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    there = {file.name for file in (ROOT / "kvboost_hf").rglob("*.py")}
    named = set(re.findall(r"`(?:\w+/)*(\w+\.py)`", page))
    assert len(named) > 30
    assert named <= there, named - there
