"""A setting is one field and one line of a docstring: its checks and its flag follow."""

import argparse
import ast
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

import kvboost_hf
from tests.internals.cli import command_line
from tests.internals.server import EngineLimits, ServerSettings
from tests.internals.top import add_flags, check_bounds, given, setting, shared

pytestmark = pytest.mark.daily

GROUP = "how many"


@dataclass(frozen=True)
class _Sizes:
    """Sizes.

    Args:
        rows: Rows of a table, at 100% of
            its `width`.
        width: Characters of a line; None for those of the terminal.
        names: Names of columns.
        short: Print less.
        hidden: No flag.

    Raises:
        ValueError: for what is out of bounds.
    """

    rows: int = setting(3, group=GROUP, least=2)
    width: int | None = setting(None, group=GROUP, flag="line-width", above=0)
    names: tuple[str, ...] = setting((), group=GROUP, flag="name", metavar="NAME")
    short: bool = setting(False, group=GROUP)
    hidden: float = setting(0.5, least=0, below=1)

    def __post_init__(self) -> None:
        check_bounds(self)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_flags(made, _Sizes, GROUP)
    return made


def test_flags_give_the_settings() -> None:
    assert _Sizes(**given(_Sizes, parser().parse_args([]))) == _Sizes()
    typed = ["--rows", "4", "--line-width", "8", "--name", "a", "--name", "b", "--short"]
    assert _Sizes(**given(_Sizes, parser().parse_args(typed))) == _Sizes(4, 8, ("a", "b"), True)
    with pytest.raises(SystemExit):
        parser().parse_args(["--hidden", "0.1"])


def test_help_is_the_docstring() -> None:
    told = " ".join(parser().format_help().split())
    for text in (
        "--rows ROWS rows of a table, at 100% of its --line-width (default: 3)",
        "characters of a line (default: those of the terminal)",
        "--name NAME names of columns; repeatable",
        "--short print less",
    ):
        assert text in told


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rows": 1}, r"`rows` must be 2 or more, got 1\.$"),
        ({"width": 0}, r"`width` must be positive, got 0\. Pass None for those of the terminal\."),
        ({"hidden": 1.0}, r"`hidden` must be from 0 to less than 1, got 1\.0\."),
        ({"hidden": -0.1}, r"`hidden` must be from 0"),
        ({"hidden": float("nan")}, r"`hidden` must be from 0"),
    ],
)
def test_bounds(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _Sizes(**wrong)  # type: ignore[arg-type]


def test_bounds_themselves() -> None:
    _Sizes(rows=2, width=1, hidden=0)


def test_every_setting_of_the_server_has_a_flag() -> None:
    options = command_line(["serve"]).parse_args(["serve"])
    with_files = {"operator_keys", "tls"}
    assert {each.name for each in fields(ServerSettings)} - with_files == given(ServerSettings, options).keys()
    assert {"operator_key_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"} <= vars(options).keys()


def test_limits_of_the_engine_are_settings_of_the_server() -> None:
    found = shared(EngineLimits, ServerSettings(model_name="any", max_queue_size=7))
    assert found.keys() == {each.name for each in fields(EngineLimits)} - {"max_client_share"}
    assert found["max_queue_size"] == 7
    defaults = shared(EngineLimits, ServerSettings(model_name="any"))
    assert {each.name: each.default for each in fields(EngineLimits) if each.name in defaults} == defaults


@dataclass(frozen=True)
class _Kinds:
    """Kinds.

    Args:
        mode: The mode; others are refused.
        share: A share; None is all.
        on: Whether it is on.
        either: Whether it is; None is as it was.
        sizes: Several sizes.
        number: A number that is parsed.
    """

    mode: Literal["fast", "slow"] = setting("fast")
    share: float | None = setting(None, least=0, most=1)
    on: bool = setting(True)
    either: bool | None = setting(None)
    sizes: tuple[int, ...] = setting((), nargs="+")
    number: int | str = setting(1, parse=lambda text: int(text, 16), flag=("number", "hex"))

    def __post_init__(self) -> None:
        check_bounds(self)


def test_all_fields_are_flags_where_no_group_is_named() -> None:
    made = argparse.ArgumentParser()
    add_flags(made, _Kinds)
    assert vars(made.parse_args([])) == {
        "mode": "fast", "share": None, "on": True, "either": None, "sizes": [], "number": 1,
    }  # fmt: skip
    typed = ["--mode", "slow", "--share", "0.5", "--no-on", "--either", "--sizes", "1", "2", "--hex", "ff"]
    assert list(vars(made.parse_args(typed)).values()) == ["slow", 0.5, False, True, [1, 2], 255]
    unset = argparse.ArgumentParser()
    add_flags(unset, _Kinds, unset=True)
    assert set(vars(unset.parse_args([])).values()) == {None}
    told = " ".join(made.format_help().split())
    for text in ("the mode; others are refused (default: fast)", "a share (default: all)", "(default: as it was)"):
        assert text in told


def test_an_error_of_what_parses_a_flag_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    made = argparse.ArgumentParser()
    add_flags(made, _Kinds)
    for typed, says in ((["--hex", "g"], "invalid literal for int() with base 16"), (["--mode", "no"], "'slow'")):
        with pytest.raises(SystemExit):
            made.parse_args(typed)
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mode": "no"}, r"`mode` must be one of \('fast', 'slow'\), got 'no'\."),
        ({"mode": None}, r"`mode` must be one of"),
        ({"share": "1"}, r"`share` must be a number, got '1'\."),
        ({"share": True}, r"`share` must be a number, got True\."),
        ({"share": 1.1}, r"`share` must be from 0 to 1, got 1\.1\. Pass None for all\."),
        ({"on": 1}, r"`on` must be True or False, got 1\."),
        ({"on": None}, r"`on` must be True or False, got None\."),
    ],
)
def test_types_and_choices(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _Kinds(**wrong)  # type: ignore[arg-type]


PACKAGE = Path(kvboost_hf.__file__).parent


def spelled() -> dict[str, set[str]]:
    """The files that have a name as a field or as a text of its own, flags included; not the table of migration."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value.removeprefix("--").replace("-", "_")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            else:
                continue
            if path.name != "old_names.py":
                found.setdefault(name, set()).add(path.relative_to(PACKAGE).as_posix())
    return found


def test_a_setting_is_spelled_where_its_field_is() -> None:
    found = spelled()
    streaming = ("keep_first_k", "keep_last_k", "n_staging_slots", "host_budget", "streaming_mode")
    drafts = ("max_nodes", "speculative_tree_max_depth", "speculative_tree_node_budget")
    for name in (*streaming, *drafts):
        assert found[name] == {"config.py"}, name
    for name in ("chunk_boundary_window", "kv_cache_bits", "disk_cache_dir", "max_cache_bytes"):
        assert found[name] - {"bench/peers.py"} == {"engine/settings.py"}, name  # that runs kvboost itself
    for name in ("ping_s", "max_body_bytes", "strip_head", "ssl_certfile", "ssl_ca_certs"):
        assert found[name] == {"server/settings.py"}, name
    for name in ("overlap_k", "min_prefill_saving"):  # of a policy, and of an engine that makes one
        assert found[name] == {"config.py", "engine/settings.py"}, name


def test_no_flag_is_written_by_hand() -> None:
    """Only what names no setting is: arguments without a flag, `--version`, and the flags that are refused."""
    found: list[str] = []
    for path in (PACKAGE / "cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
                found += [getattr(name, "value", "a name") for name in node.args]
    assert sorted(found) == ["--version", "a name", "files", "folder"]
