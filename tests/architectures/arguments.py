"""The arguments of forwards of all architectures, by release of transformers, and what each is to reuse.

An argument that a release adds is taken for one that K/V may depend on: no answer is wrong, and whoever passes it
computes all. So that nobody does unawares, a test compares the arguments with a table. `python -m
tests.architectures.arguments` writes those of the installed release into it, beside those of other releases.
"""

import inspect
import json
import re
from collections import Counter
from pathlib import Path

import transformers
from packaging.version import Version
from transformers import GenerationMixin
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.utils.generic import TransformersKwargs

from tests.architectures.models import CAUSAL_LM_TYPES, classes_of
from tests.architectures.table import recorded
from tests.internals.cache import LEAVE_KV_ALONE, OF_GENERATE, OF_MEDIA, READ

TABLE = Path(__file__).with_name("arguments.json")
RELEASE = transformers.__version__

# Methods of a class by which generate() makes the arguments of forwards, and what they write them into.
_MADE_BY = ("prepare_inputs_for_generation", "_prepare_model_inputs", "_update_model_kwargs_for_generation")
_WRITTEN = re.compile(
    r"(?:model_inputs|model_kwargs|candidate_kwargs|generation_mode_kwargs)"
    r'(?:\[|\.setdefault\(|\.update\(\{)"(\w+)"(?:\] =|,|:)'
)

Row = dict[str, str | int]  # the effect, and by release how many architectures take the argument by name


def effect(name: str) -> str:
    """What the code takes an argument for."""
    if name in READ:
        return "read"
    if name in OF_MEDIA:
        return "read with images, sound or video"
    return "leaves K/V alone" if name in LEAVE_KV_ALONE | OF_GENERATE else "K/V may depend on it"


def found() -> dict[str, int]:
    """By argument how many architectures take it by name; 0 for those that all take, or that generate() passes."""
    classes = {classes_of(name)[1] for name in CAUSAL_LM_TYPES}
    classes |= {getattr(transformers, name) for name in recorded() if hasattr(transformers, name)}
    taken: Counter[str] = Counter()
    passed = set(TransformersKwargs.__annotations__) | set(FlashAttentionKwargs.__annotations__)
    passed |= set(_WRITTEN.findall(inspect.getsource(GenerationMixin)))
    for each in classes:
        parameters = list(inspect.signature(each.forward).parameters.values())[1:]
        taken.update(parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD)
        for made_by in (getattr(each, name, None) for name in _MADE_BY):
            if made_by is not None and made_by.__module__ != GenerationMixin.__module__:
                passed |= set(_WRITTEN.findall(inspect.getsource(made_by)))
    return {name: taken[name] for name in sorted({*taken, *passed})}


def table() -> dict[str, Row]:
    """The rows that were written last, by argument."""
    rows: dict[str, Row] = json.loads(TABLE.read_text("utf-8"))
    return rows


def of_newest_release() -> set[str]:
    """The arguments of the newest release in the table."""
    rows = table()
    newest = max({release for row in rows.values() for release in row.keys() - {"effect"}}, key=Version)
    return {name for name, row in rows.items() if newest in row}


def main() -> None:
    """Write the arguments of the installed release into the table."""
    now, rows = found(), table() if TABLE.exists() else {}
    merged = {}
    for name in sorted({*now, *rows}):
        releases = {release: n for release, n in rows.get(name, {}).items() if release not in ("effect", RELEASE)}
        releases |= {RELEASE: now[name]} if name in now else {}
        if releases:
            merged[name] = {"effect": effect(name), **dict(sorted(releases.items()))}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in merged.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
