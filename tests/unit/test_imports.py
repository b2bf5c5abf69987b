"""The files of the package import each other in one direction."""

import ast
import re
from pathlib import Path

import grimp


def _on_circles(graph: grimp.ImportGraph) -> set[str]:
    """Modules that import themselves through others, and modules that import those."""
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while done := {module for module, others in imports.items() if not others & imports.keys()}:
        imports = {module: others for module, others in imports.items() if module not in done}
    return set(imports)


def test_no_file_imports_itself_through_others() -> None:
    """Imports for types and inside functions count, too."""
    graph = grimp.build_graph("kvboost_hf", cache_dir=None)
    assert _on_circles(graph) == set()
    graph.add_import(importer="kvboost_hf.errors", imported="kvboost_hf.cache.reuse")
    assert {"kvboost_hf.errors", "kvboost_hf.cache.reuse"} <= _on_circles(graph)


# What the documentation names, and what is imported by programs of their own environments.
_PUBLIC = {f"kvboost_hf{name}" for name in ("", ".assets", ".config", ".errors", ".lm_eval", ".server.ray_app")}
_ALONE = ("formats", "golden_store", "internals", "libraries")


def _internals_of(text: str) -> set[str]:
    """Modules below the public ones that a file imports."""
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module]
    return {node.module for node in imports if node.module.split(".")[0] == "kvboost_hf"} - _PUBLIC


def test_tests_reach_what_is_not_public_through_one_package() -> None:
    """What moves within the package is changed in `tests/internals`, and in no test."""
    tests = Path(__file__).parents[1]
    files = [path for path in tests.rglob("*.py") if path.relative_to(tests).parts[0] not in _ALONE]
    assert len(files) > 300
    old = {"kvboost_hf.streaming"}  # names that are gone, in the test of what is said of them
    found = {path.name: _internals_of(path.read_text()) for path in files}
    assert {name: names for name, names in found.items() if names} == {"test_migration.py": old}
    assert _internals_of("def f():\n    from kvboost_hf.cache.reuse import ChunkReuseCache") == {
        "kvboost_hf.cache.reuse"
    }


_CLOCK = re.compile(r"setattr\(\s*(time,\s*\"|\"time\.)(monotonic|sleep)\b")


def test_no_test_sets_the_clock_of_all_threads() -> None:
    """Servers that other tests share sleep by it. A test sets the `time` of a module of the package."""
    files = [path for path in Path(__file__).parents[1].rglob("*.py") if path != Path(__file__)]
    assert [path.name for path in files if _CLOCK.search(path.read_text())] == []
    assert _CLOCK.search('monkeypatch.setattr(time, "monotonic", clock)')
    assert _CLOCK.search('monkeypatch.setattr("time.monotonic", clock)')
