"""`--config FILE`: flags of `kvboost-hf serve` and `kvboost-hf warm` from a TOML file."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from tests.internals.cli import apply_config, command_line, main

pytestmark = pytest.mark.daily


def parsed(file: Path, text: str, *arguments: str, command: str = "serve", mode: int = 0o600) -> argparse.Namespace:
    """The flags of a command with a file of this text."""
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)
    parser, line = command_line(), [command, "--config", str(file), *arguments]
    apply_config(parser.parse_args(line), parser)
    return parser.parse_args(line)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.toml"


@pytest.mark.parametrize(
    ("text", "dest", "value"),
    [
        ("port = 9000", "port", 9000),
        ("\ufeffport = 9000", "port", 9000),  # as editors on Windows write it
        ("max_batch_size = 3", "max_batch_size", 3),
        ("max-batch-size = 3", "max_batch_size", 3),
        ("timeout-s = 5", "timeout_s", 5.0),
        ("drain-s = 0.5", "drain_s", 0.5),
        ("repair = 'query'", "recompute_strategy", "query"),
        ("max-cache-bytes = '2GiB'", "max_cache_bytes", 2 * 2**30),
        ("max-cache-bytes = 1000000", "max_cache_bytes", 1000000),
        ("vram-budget = 1000000", "vram_budget", 1000000),
        ("host-budget = '2GiB'", "host_budget", "2GiB"),
        ("live-quant = 4", "live_quant", "4"),
        ("kv-cache-bits = 8", "kv_cache_bits", 8),
        ("embeddings = true", "embeddings", True),
        ("oom-planning = false", "oom_planning", False),
        ("progressive = true", "progressive", True),
        ("speculative-mode-policy = 'flat'", "speculative_mode_policy", "chain"),
        ("api-key-file = '/k'", "api_key_file", Path("/k")),
        ("api-key = ['a', 'b']", "api_key", ["a", "b"]),
        ("warm = 'You read.'", "warm", ["You read."]),
        ("tiers = ['disk:a', 'disk:b']", "tiers", ["disk:a", "disk:b"]),
        ("model = 'org/name'", "model", "org/name"),
    ],
)
def test_a_value_is_that_of_the_flag(file: Path, text: str, dest: str, value: Any) -> None:
    found = getattr(parsed(file, text), dest)
    assert (found, type(found)) == (value, type(value))


def test_the_command_line_wins(file: Path) -> None:
    text = "port = 9000\nallowed-host = ['a', 'b']\ntiers = ['disk:a']\nembeddings = true\nhost = 'h'"
    found = parsed(file, text, "--port", "1", "--allowed-host", "c", "--tiers", "disk:c")
    assert (found.port, found.allowed_host, found.tiers) == (1, ["c"], ["disk:c"])
    assert (found.embeddings, found.host, found.drain_s) == (True, "h", 30.0)
    assert not parsed(file, "oom-planning = true", "--no-oom-planning").oom_planning


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-batchsize = 3", "`max-batchsize` is no flag of this command. The nearest is `max-batch-size`."),
        ("[server]\nport = 3", "Write flags without `[server]`."),
        ("nope = 3", "`nope` is no flag of this command. `--help` lists all."),
        ("no-oom-planning = true", "The nearest is `oom-planning`."),
        ("config = 'other'", "`config` is no flag"),
        ("port = '9000'", "`port`: must be a whole number, got '9000'."),
        ("port = true", "`port`: must be a whole number, got True."),
        ("port = 1.5", "`port`: must be a whole number, got 1.5."),
        ("port = [1]", "`port`: must be a whole number, got [1]."),
        ("timeout-s = 'long'", "`timeout-s`: must be a number, got 'long'."),
        ("embeddings = 1", "`embeddings`: must be true or false, got 1."),
        ("model = true", "`model`: must be a text, got True."),
        ("tiers = [['a']]", "`tiers`: must be a text, or a list of them, got ['a']."),
        ("log-level = 'loud'", "`log-level`: invalid choice: 'loud'"),
        ("max-cache-bytes = 'much'", "`max-cache-bytes`: must be bytes"),
        ("port = 1\nport = 2", "must be a TOML file"),
        ("port", "must be a TOML file"),
        ("max-batch-size = 1\nmax_batch_size = 2", "`max_batch_size` is given twice"),
        ("repair = 'query'\nrecompute-strategy = 'exact'", "given twice, by two names of one flag"),
        ("workers = 2", "`workers`: "),
    ],
)
def test_what_is_wrong_is_named(file: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        parsed(file, text)
    assert says in str(refused.value)
    assert str(file) in str(refused.value)
    assert main(["serve", "--config", str(file)]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_is_not_there(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(file)]) == 2
    assert f"got {file}: [Errno 2]" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["api-key = 'a'", "tiers = ['redis://:password@host']"])
def test_a_file_with_secrets_is_closed(file: Path, text: str) -> None:
    parsed(file, text, mode=0o640)
    with pytest.raises(ValueError, match=r"must be closed to other users, but its mode is 0644\. Run: chmod 600"):
        parsed(file, text, mode=0o644)
    parsed(file, "tiers = ['redis://host']", mode=0o644)


def test_warm_reads_the_file_of_the_server(file: Path) -> None:
    found = parsed(file, "port = 9000\nchunk-size = 64\nsalt = 's'", "text", command="warm")
    assert (found.chunk_size, found.salt, found.files) == (64, "s", [Path("text")])
    assert not hasattr(found, "port")
    with pytest.raises(ValueError, match="The nearest is `chunk-size`"):
        parsed(file, "chunks-size = 64", "text", command="warm")


def test_a_value_out_of_its_range_is_refused_as_that_of_a_flag(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("max-batch-size = 0", encoding="utf-8")
    assert main(["serve", "--config", str(file)]) == 2
    assert "`max_batch_size` must be positive, got 0." in capsys.readouterr().err
