"""The package and its command import torch and transformers only for what needs them."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.assets import load_embedded
from tests.internals.cli import command_line
from tests.internals.engine import EngineSettings

REGISTERED = "from transformers import AttentionInterface; assert 'kvboost_fa2' in AttentionInterface().valid_keys()"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


COMMANDS = ("demo", "bench", "doctor", "check", "verify", "fits", "warm", "serve", "inspect", "prune")
WRONG_VALUES = (
    ["bench", "--arms", "nothing"],
    ["bench", "--peers", "nothing"],
    ["bench", "--workloads", "nothing"],
    ["demo", "--figure", "times.txt"],
    ["check", "--dtype", "int3"],
    ["fits", "--bits", "3"],
    ["inspect"],
    ["inspect", "--tiers", "disk:folder", "--limit", "0"],
    ["serve", "--port", "a"],
    ["serve", "--recompute-strategy", "nothing"],
    ["serve", "--config", "/no/such/file.toml"],
    ["warm"],
)


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["--help"], ["--version"], ["verfy"], ["nothing like it"]),
        *([name, flag] for name in COMMANDS for flag in ("--help", "--nothing-like-it")),
        *WRONG_VALUES,
    ],
    ids=" ".join,
)
def test_help_and_wrong_arguments_need_no_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from kvboost_hf.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
assert not {{"torch", "transformers", "numpy"}} & sys.modules.keys()
"""
    assert "kvboost" in run(code)


def test_what_is_stored_is_shown_without_torch(tmp_path: Path) -> None:
    model, tokenizer = load_embedded()
    with ChunkStore(model, tiers=[f"disk:{tmp_path}:1GB"], chunk_size=16) as store:
        inputs = tokenizer("Anna lives in Oslo. She plays the piano. " * 4, return_tensors="pt")
        model.generate(**inputs, cache=ChunkReuseCache(model, store), max_new_tokens=1)
        store.flush()
    code = f"""
import sys
from kvboost_hf.cli import main
assert main(["inspect", "--tiers", "disk:{tmp_path}"]) == 0
assert main(["inspect", "--tiers", "disk:{tmp_path}", "--json", "-"]) == 0
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    told = run(code)
    assert "2 stored" in told or "3 stored" in told, told


def test_doctor_says_what_is_installed_before_it_imports_torch() -> None:
    code = """
import sys
from kvboost_hf.cli import main
sys.modules["torch"] = None
try:
    main(["doctor"])
except ImportError:
    pass
"""
    told = [line.split() for line in run(code).splitlines()]
    assert {"Python", "torch", "transformers", "extra"} <= {words[1] for words in told if words[0] in ("ok", "--")}


def test_commands_that_are_tried_are_all() -> None:
    commands = next(each for each in command_line([])._actions if isinstance(each, argparse._SubParsersAction))
    assert set(COMMANDS) == set(commands.choices)


def test_defaults_of_flags_are_those_of_settings() -> None:
    flags, settings = vars(command_line(["serve"]).parse_args(["serve"])), EngineSettings()
    for name in ("chunk_size", "sink_tokens", "overlap_k", "progressive"):
        assert flags[name] == getattr(settings, name), name


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


def test_what_builds_extensions_is_not_imported() -> None:
    run("from kvboost_hf import ChunkReuseCache, load_streamed; import sys; assert 'setuptools' not in sys.modules")


@pytest.mark.slow
def test_a_program_that_ends_says_nothing() -> None:
    """What the package keeps for forks and threads ends in order."""
    assert run("from kvboost_hf import *; from kvboost_hf.cache.forward import idle; idle.Idle()") == ""
    assert run("from kvboost_hf.cli import main; main(['check'])").count("Exception") == 0


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


@pytest.mark.parametrize("how", ["the command", "the engine"])
def test_texts_are_warmed_whatever_else_was_imported(how: str, tmp_path: Path) -> None:
    text = "The lamp is red. " * 40
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    told = ["warm", str(tmp_path / "text.txt"), "--tiers", f"disk:{tmp_path / 'kept'}:1GB", "--dtype", "float32"]
    by_engine = f"""
from kvboost_hf.assets import load_embedded
from kvboost_hf.engine import KVBoost
assert KVBoost(*load_embedded()).warm({text!r})
"""
    by_command = f"from kvboost_hf.cli import main; assert main({told!r}) == 0"
    done = subprocess.run([sys.executable, "-c", by_command if how == "the command" else by_engine], check=False)
    assert done.returncode == 0
