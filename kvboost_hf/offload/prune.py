"""Removes files of streamed layers that no process uses."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvboost_hf.offload.disk import LAYER, locked_folder, read_record

if sys.platform != "win32":
    import fcntl

_UNFINISHED = re.compile(r"(layer|checkpoint)-[0-9a-f]{32}\.tmp")
_RECORD = re.compile(r"checkpoint-[0-9a-f]{32}\.json")
_FORMER = re.compile(r"layer-[0-9]{5}\.bin")  # of releases whose processes hold no locks


@dataclass(frozen=True, slots=True)
class LayerFile:
    """The file of a layer."""

    path: Path  # the path of the file
    nbytes: int  # the size of the file in bytes
    models: tuple[str, ...]  # names of the models that were loaded through it, as far as that is known
    in_use: bool  # whether a process streams it, or may do so


def prune_layers(folder: str | Path, *, dry_run: bool = False) -> list[LayerFile]:
    """Remove the files of streamed layers that no living process has open.

    Args:
        folder: A `disk_folder` of `StreamingConfig`.
        dry_run: Remove nothing.

    Returns:
        All files of layers that were there; those not in use are gone, unless this is a dry run.

    Raises:
        ValueError: there is no such folder, or no layer in it.
        OSError: the folder cannot be read, or a file cannot be removed.
    """
    if not str(folder):
        raise ValueError("`folder` must name a folder, got ''. Pass the `disk_folder` of a StreamingConfig.")
    place = Path(folder).expanduser().absolute()
    if not place.is_dir():
        raise ValueError(f"There is no folder {str(place)!r}. Pass the `disk_folder` of a StreamingConfig.")
    there = list(place.iterdir())
    if there and not any(map(_is_ours, there)):
        raise ValueError(f"{str(place)!r} holds no streamed layers. Pass the `disk_folder` of a StreamingConfig.")
    with locked_folder(place):  # so that nobody opens a file before it is removed
        records = {path: read_record(path) for path in there if _RECORD.fullmatch(path.name)}
        models: dict[str, set[str]] = {}  # by name of a file
        for record in filter(None, records.values()):
            for name, *_ in record["layers"].values():
                models.setdefault(name, set()).add(record["model"])
        found = [
            LayerFile(path, path.stat().st_size, tuple(sorted(models.get(path.name, ()))), _in_use(path))
            for path in sorted(place.iterdir())
            if LAYER.fullmatch(path.name)
        ]
        if not dry_run:
            _remove(place, found, records)
            found = [replace(each, in_use=each.path.exists()) for each in found]
    return found


def former_files(folder: str | Path) -> list[Path]:
    """Files of layers that earlier releases wrote, whose processes held no locks."""
    return sorted(path for path in Path(folder).expanduser().iterdir() if _FORMER.fullmatch(path.name))


def _remove(place: Path, found: Sequence[LayerFile], records: dict[Path, dict[str, object] | None]) -> None:
    for each in found:
        if not each.in_use:
            try:
                each.path.unlink(missing_ok=True)
            except PermissionError:
                if sys.platform != "win32":  # where open files cannot be removed
                    raise
    for path in place.iterdir():  # whoever writes holds the lock of the folder
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)
    for path, record in records.items():
        layers = record["layers"] if record is not None else {}
        assert isinstance(layers, dict)
        if not any((place / name).exists() for name, *_ in layers.values()):
            path.unlink(missing_ok=True)


def _in_use(path: Path) -> bool:
    """Whether somebody holds a lock of a file, or that cannot be told."""
    if sys.platform == "win32":
        return False  # the system refuses to remove what is open
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _is_ours(path: Path) -> bool:
    return any(pattern.fullmatch(path.name) for pattern in (LAYER, _UNFINISHED, _FORMER, _RECORD))
