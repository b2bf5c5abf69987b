"""What releases promise: the public API as it is written down, and a recipe that asks for what pyproject.toml does."""

import sys
import tomllib
from itertools import zip_longest
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import kvboost_hf
from tests import public_api

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
RECIPE = yaml.safe_load((ROOT / "deploy" / "conda" / "recipe.yaml").read_text("utf-8"))
IN_CONDA = {"torch": "pytorch", "xxhash": "python-xxhash"}


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this version of Python writes some types in other words")
def test_the_public_api_is_the_one_written_down() -> None:
    written = public_api.PAGE.read_text("utf-8").splitlines()
    found = "\n".join(public_api.lines()).splitlines()
    changed = [(was, now) for was, now in zip_longest(written, found) if was != now]
    assert found == written, (
        f"The public API is not that of {public_api.PAGE.name}: first {changed[0]}. If users' code still works, write "
        "it again: python -m tests.public_api > tests/public_api.txt. If it does not, deprecate first, as "
        "docs/compatibility.md says."
    )


def test_a_changed_signature_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(public_api.lines())
    monkeypatch.setattr(kvboost_hf, "last_cache", lambda model, index=0: None)
    assert len(set(before) ^ set(public_api.lines())) == 2


def test_the_recipe_for_conda_asks_for_what_the_wheel_does() -> None:
    wanted = {f"python {PYPROJECT['project']['requires-python']}"}
    for requirement in map(Requirement, PYPROJECT["project"]["dependencies"]):
        wanted.add(f"{IN_CONDA.get(requirement.name, requirement.name)} {requirement.specifier}")
    assert set(RECIPE["requirements"]["run"]) == wanted
    build = {f"{each.name} {each.specifier}" for each in map(Requirement, PYPROJECT["build-system"]["requires"])}
    assert set(RECIPE["requirements"]["host"]) == {"pip", f"python {PYPROJECT['project']['requires-python']}"} | build
    scripts = {f"{name} = {place}" for name, place in PYPROJECT["project"]["scripts"].items()}
    assert set(RECIPE["build"]["python"]["entry_points"]) == scripts
    assert RECIPE["context"]["version"] == kvboost_hf.__version__
    assert RECIPE["about"]["license"] == PYPROJECT["project"]["license"]
    assert RECIPE["about"]["summary"] == PYPROJECT["project"]["description"]
