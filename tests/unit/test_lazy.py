"""The package and its command import torch and transformers only for what needs them."""

import subprocess
import sys

import pytest

REGISTERED = "from transformers import AttentionInterface; assert 'kvboost_fa2' in AttentionInterface().valid_keys()"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["verfy"], ["nothing like it"], []])
def test_help_and_mistyped_commands_need_no_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from kvboost_hf.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    assert "kvboost" in run(code)


@pytest.mark.parametrize(
    "imports",
    [
        "import kvboost_hf",
        "import transformers; import kvboost_hf",
        "import transformers.modeling_utils; import kvboost_hf",
        "from kvboost_hf import ChunkReuseCache",
        "from kvboost_hf.config import ReusePolicy",
        "import sys; sys.modules['wrapt'] = None; import kvboost_hf",
    ],
)
def test_the_attention_is_registered_whoever_comes_first(imports: str) -> None:
    run(f"{imports}\n{REGISTERED}")


def test_public_names_are_there_when_they_are_asked_for() -> None:
    code = """
import sys
import kvboost_hf
assert "torch" not in sys.modules
assert "ChunkReuseCache" in dir(kvboost_hf)
from kvboost_hf import *
assert sorted(kvboost_hf.__all__) == sorted(set(kvboost_hf.__all__) & globals().keys())
assert kvboost_hf.ChunkReuseCache is ChunkReuseCache
assert not hasattr(kvboost_hf, "ChunkReuseCach")
assert not hasattr(kvboost_hf, "__wrapped__")
"""
    run(code)
