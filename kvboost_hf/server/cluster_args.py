"""`ClusterArgs`: what a cluster serves, and how, from the mapping that a file of YAML has for it."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvboost_hf.assets import load_embedded
from kvboost_hf.cache.tiers.record import read_tier_key
from kvboost_hf.engine.load import load
from kvboost_hf.engine.settings import EngineSettings
from kvboost_hf.server.settings import ServerSettings, TlsFiles, read_keys

_FILES = ("api_keys_file", "operator_keys_file", "tier_key_file")
_OF_BUILD = ("replicas", "fronts", "load_factor", "actor_options", "check_resources")
_KEYS = ("model", "model_args", "server", "kept", *_FILES, *_OF_BUILD)
_SECRET = {"api_keys": "api_keys_file", "operator_keys": "operator_keys_file", "tier_key": "tier_key_file"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterArgs:
    """The arguments of `build`.

    Args:
        load: Makes the model and its tokenizer.
        settings: The settings of each replica's server.
        kept: What each replica keeps of prompts.
        more: The other arguments, by name.
    """

    load: Callable[[], tuple[PreTrainedModel, Any]]
    settings: ServerSettings
    kept: EngineSettings
    more: Mapping[str, Any]

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> "ClusterArgs":
        """The arguments that a mapping of texts, numbers and lists has.

        Args:
            args: `model`: a name at the hub, a folder, or `embedded` for the model of the package. `model_args`:
                arguments of `from_pretrained()`; `dtype` is `auto` where it is left out. `server`: fields of
                `ServerSettings`; `model_name` is that of the model where it is left out. `kept`: fields of
                `EngineSettings`. `api_keys_file`, `operator_keys_file`, `tier_key_file`: paths of files with secrets,
                which are nowhere else. `replicas`, `fronts`, `load_factor`, `actor_options`, `check_resources`: as
                `build` takes them.

        Raises:
            ValueError: for a name that is none, a secret, values of a wrong type or out of range, or a file that
                cannot be read.
        """
        _require_known(args, _KEYS, "args")
        name = args.get("model")
        if not isinstance(name, str) or not name:
            raise ValueError(f"`args` must have a `model`, the name or the folder of one, got {name!r}.")
        server, kept = dict(_section(args, "server")), dict(_section(args, "kept"))
        server.setdefault("model_name", Path(name).name if Path(name).is_dir() else name)
        if isinstance(tls := server.get("tls"), Mapping):
            paths: dict[str, Any] = {key: Path(path) if key != "password" else path for key, path in tls.items()}
            server["tls"] = _made(TlsFiles, paths, "server.tls")
        for names, reader, into in (
            (("api_keys", "operator_keys"), read_keys, server),
            (("tier_key",), read_tier_key, kept),
        ):
            for secret in names:
                if (path := args.get(_SECRET[secret])) is not None:
                    into[secret] = reader(Path(path))
        options = {"dtype": "auto", **_section(args, "model_args")}
        return cls(
            load=load_embedded if name == "embedded" else partial(load, name, None, None, options),
            settings=_made(ServerSettings, server, "server"),
            kept=_made(EngineSettings, kept, "kept"),
            more={key: args[key] for key in _OF_BUILD if key in args},
        )


def _section(args: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping in the arguments, which has no secrets."""
    found = args.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"`{name}` must be a mapping, got {found!r}.")
    for key in _SECRET.keys() & found.keys():
        raise ValueError(
            f"`{name}` must not have `{key}`: whoever reads the file would know it. Pass the path of a file as "
            f"`{_SECRET[key]}`."
        )
    return found


def _made(kind: Callable[..., Any], values: Mapping[str, Any], section: str) -> Any:
    """A dataclass of settings; lists become tuples where it has them."""
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    _require_known(values, known, section)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        default = known[name].default
        if isinstance(value, list):
            value = tuple(value)
        numbers = int | float if isinstance(default, float) else int
        wrong = {
            bool: not isinstance(value, bool),
            str: not isinstance(value, str),
            tuple: not isinstance(value, tuple),
            int: isinstance(value, bool) or not isinstance(value, numbers),
            float: isinstance(value, bool) or not isinstance(value, numbers),
        }
        if default is not MISSING and value is not None and wrong.get(type(default), False):
            what = {bool: "true or false", str: "a text", tuple: "a list", int: "a whole number"}
            raise ValueError(f"`{section}.{name}` must be {what.get(type(default), 'a number')}, got {value!r}.")
        checked[name] = value
    try:
        return kind(**checked)
    except TypeError as error:  # such as a text in place of a number
        raise ValueError(f"`{section}` has a value of a wrong type: {error}.") from error


def _require_known(values: Mapping[str, Any], known: Any, where: str) -> None:
    for name in values:
        if name not in known:
            close = get_close_matches(str(name), list(known), n=1)
            remedy = f"Did you mean `{close[0]}`?" if close else f"There are {', '.join(sorted(known))}."
            raise ValueError(f"`{where}` must have no `{name}`: there is no such setting. {remedy}")
