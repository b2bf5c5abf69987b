"""Finds what of a schema no grammar can be compiled with, and leaves it to the model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvboost_hf.server.grammars.fitting import LISTS, OBJECT, Fitted, Left, under

_MOST_TRIALS = 64  # compilations of one schema


def narrowed(fitted: Fitted, compiles: Callable[[Mapping[str, Any]], bool]) -> Fitted:
    """Leave to the model what a grammar of the schema cannot be compiled with; `ValueError` if it is strict."""
    search = _Search(fitted.schema, compiles)
    schema = search.schema()
    return replace(fitted, schema=schema, left=(*fitted.left, *search.left)).require()


@dataclass
class _Search:
    """Finds what a grammar cannot be compiled with, by compiling it without."""

    root: Mapping[str, Any]
    compiles: Callable[[Mapping[str, Any]], bool]
    left: list[Left] = field(default_factory=list)
    _trials: int = 0

    def schema(self) -> Mapping[str, Any]:
        """The schema without it."""
        if self._holds(self.root):
            return self.root
        self._defs = dict(self.root.get("$defs", {}))
        for name in self._failing([(name, each) for name, each in self._defs.items()]):
            self._defs[name] = self._part(self._defs[name], f"$defs.{name}")
        found = self._part({name: value for name, value in self.root.items() if name != "$defs"}, "")
        if isinstance(found, dict) and self._is_fine(found):
            return {**found, **({"$defs": self._defs} if self._defs else {})}
        self.left = [Left("", "its grammar is too large, or allows no value")]
        return OBJECT if self.root.get("type") == "object" else {}

    def _holds(self, schema: Any) -> bool:
        self._trials += 1
        return self._trials <= _MOST_TRIALS and self.compiles(schema)

    def _is_fine(self, schema: Any) -> bool:
        return self._holds({**schema, **({"$defs": self._defs} if self._defs else {})})

    def _failing(self, parts: list[tuple[Any, Any]]) -> list[Any]:
        """The keys of those schemas that no grammar can be compiled with."""
        parts = [(key, part) for key, part in parts if isinstance(part, dict) and part]
        tried = [part for _, part in parts]
        if not parts or self._is_fine({"type": "array", "prefixItems": tried, "minItems": len(tried)}):
            return []
        if len(parts) == 1:
            return [parts[0][0]]
        half = len(parts) // 2
        return [*self._failing(parts[:half]), *self._failing(parts[half:])]

    def _part(self, schema: Any, path: str) -> Any:
        """A part of the schema without it."""
        found = dict(schema)
        inner = dict(_inner(found))
        for keys in self._failing(list(inner.items())):
            _put(found, keys, self._part(inner[keys], ".".join(filter(None, (path, *map(str, keys))))))
        if self._is_fine(found):
            return found
        for name in [name for name in found if name not in ("properties", "type")] + ["properties", "type"]:
            fewer = {key: value for key, value in found.items() if key != name}
            if name == "patternProperties":
                fewer["additionalProperties"] = True
            if name in found and self._is_fine(fewer):
                self.left.append(Left(under(path, name), "no grammar can be compiled with it"))
                return fewer
        self.left.append(Left(path, "no grammar can be compiled with it"))
        return True


def _inner(schema: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The schemas in one, with the keys that lead there."""
    for name in ("properties", "patternProperties"):
        yield from (((name, key), each) for key, each in schema.get(name, {}).items())
    for name in (*LISTS, "prefixItems"):
        yield from (((name, n), each) for n, each in enumerate(schema.get(name, ())))
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield (name,), schema[name]


def _put(schema: dict[str, Any], keys: tuple[Any, ...], value: Any) -> None:
    if len(keys) == 1:
        schema[keys[0]] = value
        return
    outer = schema[keys[0]]
    schema[keys[0]] = inner = dict(outer) if isinstance(outer, dict) else list(outer)
    inner[keys[1]] = value
