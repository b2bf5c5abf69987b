"""What is released: a wheel and a source distribution that hold all that is needed, and nothing that is not."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvboost_hf

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvboost_hf"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel and a source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


def _wheel(folder: Path) -> Path:
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_the_package(built: Path) -> None:
    names = set(zipfile.ZipFile(_wheel(built)).namelist())
    ours = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    ours = {name for name in ours if "__pycache__" not in name}
    told = f"kvboost_hf-{kvboost_hf.__version__}.dist-info"
    assert {name for name in names if name.startswith("kvboost_hf/")} == ours
    assert {"kvboost_hf/py.typed", "kvboost_hf/server/page.html", "kvboost_hf/assets/reader/model.safetensors"} <= ours
    assert {f"{told}/licenses/LICENSE", f"{told}/entry_points.txt"} <= names
    assert all(name.startswith(("kvboost_hf/", f"{told}/")) for name in names)


def test_the_source_distribution_holds_what_a_person_needs(built: Path) -> None:
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile", "constraints.txt"} <= names
    assert {"kvboost_hf/py.typed", "tests/conftest.py", "recipes/train.py", "docs/design.md"} <= names
    assert "notebooks/1_your_chat.ipynb" in names
    assert not [name for name in names if name.startswith((".venv", ".git/", "kv-cache", "dist")) or ".pyc" in name]


@pytest.mark.slow
def test_the_wheel_runs_outside_the_checkout(built: Path, tmp_path: Path) -> None:
    """With the packages of this environment, and the model that comes with it."""
    zipfile.ZipFile(_wheel(built)).extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "HF_HUB_OFFLINE": "1"}
    code = "import kvboost_hf; from kvboost_hf.cli import main; print(kvboost_hf.__file__); raise SystemExit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", code, "check"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(tmp_path / "installed"))
    assert "exact" in ran.stdout


def test_the_version_is_said_once() -> None:
    files = ("pyproject.toml", "README.md", "CITATION.cff", "mkdocs.yml")
    told = [path for path in (ROOT / name for name in files) if path.exists()]
    assert not [path.name for path in told if f'version = "{kvboost_hf.__version__}"' in path.read_text("utf-8")]
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text("utf-8")


def test_the_tested_set_fits_builds_of_torch_for_gpus() -> None:
    """Such a build brings packages of its own, which the tested set does not ask for in another release."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    tested = [Requirement(line.partition("#")[0]) for line in lines if not line.startswith("#")]
    (triton,) = (one for one in tested if one.name == "triton")
    assert triton.specifier.contains("3.7.1")  # which torch 2.13.0 asks for
