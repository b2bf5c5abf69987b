"""The files of the package import each other in one direction."""

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
