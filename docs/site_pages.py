"""Pages of the site that docs/ does not hold: results, notebooks, the list of changes, and the page of all files.

Pages of docs/ link to them as the repository has them, so that the links work there, too.
"""

import runpy
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add them under the paths that they have in the repository."""
    results = ROOT / "benchmarks" / "results"
    notebooks = ROOT / "notebooks"
    for path in [ROOT / "CHANGELOG.md", *results.glob("*.md"), *results.glob("*.png"), *notebooks.glob("*.ipynb")]:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV))
    files.append(File.generated(config, "files.md", content=runpy.run_path(str(ROOT / "docs" / "files.py"))["page"]()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that leave docs/ stay within the site, where docs/ is the root."""
    for name in ("benchmarks/results/", "notebooks/", "CHANGELOG.md"):
        markdown = markdown.replace(f"../{name}", name)
    return markdown
