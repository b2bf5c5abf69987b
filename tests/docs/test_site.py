"""The site builds without a warning, fetches nothing from elsewhere, and tells of every public name."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import kvboost_hf
from tests.docs.pages import ROOT

# Attributes through which a browser loads something, but for `a`, which waits for a click.
_LOADS = {"src", "srcset", "href", "data", "poster"}


class Resources(HTMLParser):
    """Collects what a browser would load with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.diagrams = 0  # drawn by a script that the theme fetches

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.diagrams += "mermaid" in given.get("class", "").split()
        if tag not in ("a", "area") and given.get("rel") != "canonical":
            self.found += [value for name, value in given.items() if name in _LOADS]


def elsewhere(page: str) -> list[str]:
    """Resources of a page that lie on other servers."""
    reader = Resources()
    reader.feed(page)
    return [one for one in reader.found if re.match(r"(?:\w+:)?//", one)] + ["mermaid"] * reader.diagrams


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages, styles = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert len(pages) > 30
    for page in pages:
        assert elsewhere(page.read_text(encoding="utf-8")) == [], page
    for style in [*styles, *site.rglob("*.svg")]:
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"""(?:url\(|@import|href=)\s*["']?(?:https?:)?//""", text), style


@pytest.mark.daily
@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        '<img src="http://images.example/x.png">',
        '<pre class="mermaid">graph</pre>',
    ],
)
def test_what_is_fetched_would_be_noticed(page: str) -> None:
    assert elsewhere(page)
    assert not elsewhere('<a href="https://example.org"></a><script src="../x.js"></script>')


@pytest.fixture(scope="module")
def reference(site: Path) -> list[str]:
    return [page.read_text(encoding="utf-8") for page in (site / "api").rglob("*.html")]


def pages_with(name: str, reference: list[str]) -> int:
    """Pages that have a heading for a name of the package."""
    return sum(f'id="kvboost_hf.{name}"' in page for page in reference)


@pytest.mark.daily
@pytest.mark.parametrize("name", kvboost_hf.__all__)
def test_every_public_name_is_in_the_reference(name: str, reference: list[str]) -> None:
    # A dataclass without a docstring is given its signature.
    text = getattr(kvboost_hf, name).__doc__ or f"{name}("
    assert not text.startswith(f"{name}("), f"{name} must have a docstring."
    assert pages_with(name, reference) == 1, f"{name} must be on one page of docs/api."


def test_a_name_that_is_not_there_would_be_noticed(reference: list[str]) -> None:
    assert pages_with("ChunkStor", reference) == 0


def test_examples_of_docstrings_are_shown_as_code(reference: list[str]) -> None:
    shown = sum("&gt;&gt;&gt;" in page for page in reference)
    assert shown >= 5
    assert not any("<blockquote>" in page for page in reference)
