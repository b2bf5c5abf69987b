"""A setting is one field and one line of a docstring: its checks and its flag follow."""

import argparse
from dataclasses import dataclass, fields

import pytest

from tests.internals.cli import command_line
from tests.internals.server import EngineLimits, ServerSettings
from tests.internals.top import add_flags, check_bounds, given, setting, shared

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
        "--rows ROWS rows of a table, at 100% of its width (default: 3)",
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
    flags = vars(command_line(["serve"]).parse_args(["serve"]))
    with_files = {"api_keys": "api_key_file", "operator_keys": "operator_key_file", "tls": "ssl_certfile"}
    assert {with_files.get(each.name, each.name) for each in fields(ServerSettings)} <= flags.keys()


def test_limits_of_the_engine_are_settings_of_the_server() -> None:
    found = shared(EngineLimits, ServerSettings(model_name="any", max_queue_size=7))
    assert found.keys() == {each.name for each in fields(EngineLimits)} - {"max_client_share"}
    assert found["max_queue_size"] == 7
    defaults = shared(EngineLimits, ServerSettings(model_name="any"))
    assert {each.name: each.default for each in fields(EngineLimits) if each.name in defaults} == defaults
