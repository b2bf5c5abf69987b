"""The public API as text: `python -m tests.public_api > tests/public_api.txt`.

Each name of `kvboost_hf.__all__` has its signature, and classes have their public methods, properties and fields. A
test compares the text, so that whoever changes the API sees it in the diff, and so does whoever reads the change.
"""

import dataclasses
import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import kvboost_hf

PAGE = Path(__file__).with_name("public_api.txt")


def lines() -> Iterator[str]:
    """The lines of the text."""
    for name in kvboost_hf.__all__:
        yield from _named(name, getattr(kvboost_hf, name))


def _named(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, ModuleType):
        for inner in value.__all__:
            yield from _named(f"{name}.{inner}", getattr(value, inner))
    elif inspect.isclass(value):
        yield from _of_class(name, value)
    elif inspect.isfunction(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name} = {value}"


def _of_class(name: str, kind: type) -> Iterator[str]:
    bases = [base.__name__ for base in kind.__bases__ if base is not object]
    yield f"{name}({', '.join(bases)})" if bases else name
    if issubclass(kind, enum.Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in kind)
        return
    if not issubclass(kind, BaseException):
        yield f"    __init__{_signature(kind)}"
    # Other libraries document what is inherited from them.
    owned = [each for each in kind.__mro__ if each.__module__.partition(".")[0] == "kvboost_hf"]
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    for attribute in sorted({key for each in owned for key in vars(each)} - fields):
        if attribute.startswith("_"):
            continue
        value = inspect.getattr_static(kind, attribute)
        if isinstance(value, property):
            returned = inspect.signature(value.fget).return_annotation if value.fget is not None else ""
            yield f"    {attribute}: {_annotation(returned)}"
        elif callable(getattr(kind, attribute)):
            yield f"    {attribute}{_signature(getattr(kind, attribute))}"


def _signature(function: Any) -> str:
    """The signature, without the modules of types; one line for each parameter of a long one."""
    found = inspect.signature(function)
    whole = _short(str(found))
    if len(whole) <= 90:
        return whole
    marks = {parameter.kind for parameter in found.parameters.values()}
    parts = list(map(str, found.parameters.values()))
    first = next((at for at, each in enumerate(found.parameters.values()) if each.kind is each.KEYWORD_ONLY), None)
    if first is not None and inspect.Parameter.VAR_POSITIONAL not in marks:
        parts.insert(first, "*")
    returned = "" if found.return_annotation is found.empty else f" -> {_annotation(found.return_annotation)}"
    return "(" + "".join(f"\n        {_short(part)}," for part in parts) + f"\n    ){returned}"


def _annotation(annotation: Any) -> str:
    return _short(inspect.formatannotation(annotation))


def _short(text: str) -> str:
    short = re.sub(r"(?<![\w'.])(?:[a-z_]\w*\.)+(?=[A-Za-z_])", "", text).replace("NoneType", "None")
    # numpy writes its alias in full before 2.5.
    return re.sub(r"\bndarray\[tuple\[Any, \.\.\.\], dtype\[(\w+)\]\]", r"NDArray[\1]", short)


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in lines())
