"""The table of architectures: read by tests, written by `make architectures`."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PreTrainedModel

from tests.architectures.models import (
    BROKEN_SINCE,
    CAUSAL_LM_TYPES,
    MULTIMODAL,
    NOT_BUILT,
    TRIED,
    classes_of,
    make_architecture,
)
from tests.architectures.outcome import Outcome
from tests.internals.top import known_architectures

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "kvboost_hf" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"

Row = dict[str, Any]

# Kinds of layers, as a cache has them, in plain words.
_WORDS = {
    "DeepseekV4CSACache": "compressed attention to picked tokens",
    "DeepseekV4HCACache": "heavily compressed attention",
    "DummyLayer": "layers that keep nothing",
    "DynamicIndexedLayer": "attention to tokens that an index picks",
    "DynamicLayer": "full attention",
    "DynamicSlidingWindowLayer": "sliding window",
    "LinearAttentionAndFullAttentionLayer": "full attention with a recurrent or convolution state",
    "LinearAttentionAndSlidingWindowAttentionLayer": "sliding window with a recurrent or convolution state",
    "LinearAttentionLayer": "recurrent or convolution state",
    "MiniMaxM3VLSparseCacheLayer": "attention to picked blocks",
}
_OTHER = "a state of its own kind"
_ANSWERS = {"exact": "yes", "bypassed": "no", "refused": "refused"}

_INTRODUCTION = """\
# Which architectures reuse works for

<!-- Written by `make architectures`. -->

**Who needs this:** you want to know whether your model works. [MoE models](recipes/moe.md) and
[hybrids](recipes/hybrids.md) have pages of their own; `kvboost-hf check --model NAME` tests your model itself.

Whether reuse gives the right answer depends on how a model is built. This page covers {types} types of causal
language models in transformers {version}, and {multimodal} multimodal models besides (with text; images, sound and
video have tests of their own), which are
{classes} classes; several types can share one.

For each class a tiny random model was built that has all kinds of layers of the real one. It answered prompts with and
without reuse: the same again, longer ones, shorter ones, unrelated ones, and a padded batch.

- **reuse yes**: the answers were those of plain `generate()`, in tokens and logits, with fewer tokens computed.
- **reuse no**: the same answers, but all was computed. The reason is that of `cache.report.bypass_reason`.
- **refused**: plain `generate()` itself takes no cache for this class; `ChunkReuseCache(model)` raises an error.

{counts}.

*Moved* says whether K/V can also be used at other positions ([moved chunks](moved.md)).
{moved} classes allow it.

A *sliding window* keeps the K/V of the last tokens only; a *recurrent or convolution state* is one state of fixed size
for all tokens so far.

## The table
"""
_LEFT_OUT = """
## Not tried

"""


def row(model: PreTrainedModel, outcome: Outcome) -> Row:
    """What the table says of a model's class."""
    return {
        "model_type": type(model).config_class.model_type,
        "outcome": outcome.outcome,
        "layers": list(outcome.layers),
        "reason": outcome.reason,
        "moved": outcome.moved,
        "moved_reason": outcome.moved_reason,
    }


def recorded() -> dict[str, Row]:
    """The rows that were written last, by class name; those that this release of transformers has broken left out."""
    return {name: found for name, found in _all_rows().items() if name in known_architectures()}


def write(rows: dict[str, Row]) -> None:
    """Write the rows, by class name, for programs, and the page for people.

    What this release has broken keeps its row, with the first such release as `before`.
    """
    old = _all_rows()
    broken = {class_name(name): {"before": since} for name, (since, _) in BROKEN_SINCE.items() if name in NOT_BUILT}
    kept = {name: old[name] | before for name, before in broken.items() if name in old}
    ROWS.write_text(json.dumps(dict(sorted((kept | rows).items())), indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(rows), encoding="utf-8")


def _all_rows() -> dict[str, Row]:
    found: dict[str, Row] = json.loads(ROWS.read_text(encoding="utf-8"))
    return found


def page(rows: dict[str, Row]) -> str:
    """The rows for people."""
    covered = [name for name in TRIED if name not in MULTIMODAL and class_name(name) in rows]
    text = _INTRODUCTION.format(
        types=f"{len(covered)} of the {len(CAUSAL_LM_TYPES)}",
        version=transformers.__version__,
        multimodal=sum(name in MULTIMODAL for name in TRIED),
        classes=len(rows),
        counts=_counts(rows),
        moved=sum(found["moved"] for found in rows.values()),
    )
    alike: dict[str, list[str]] = {}
    for name, found in sorted(rows.items()):
        words = "; ".join(_in_words(found["layers"])) or "nothing that a caller sees"
        answers = f"reuse {_ANSWERS[found['outcome']]}, moved {'yes' if found['moved'] else 'no'}"
        why = found["reason"] or found["moved_reason"]
        alike.setdefault(f"**{words}**: {answers}{f' ({why})' if why else ''}", []).append(name)
    text += "".join(f"\n{head}:\n{', '.join(names)}.\n" for head, names in alike.items())
    reasons: dict[str, list[str]] = {}
    for name, why in sorted(NOT_BUILT.items()):
        reasons.setdefault(why, []).append(name)
    return text + _LEFT_OUT + "".join(f"- {', '.join(names)}: {why}\n" for why, names in reasons.items())


def class_name(model_type: str) -> str:
    """Of the model that is made for a type."""
    if model_type in MULTIMODAL:
        return type(make_architecture(model_type)).__name__
    return classes_of(model_type)[1].__name__


def _counts(rows: dict[str, Row]) -> str:
    outcomes = [found["outcome"] for found in rows.values()]
    return ", ".join(f"{answer}: {outcomes.count(name)} classes" for name, answer in _ANSWERS.items()).capitalize()


def _in_words(layers: list[str]) -> list[str]:
    return list(dict.fromkeys(_WORDS.get(name, _OTHER) for name in layers))


IS_TESTED_RELEASE = f"transformers {transformers.__version__}," in PAGE.read_text("utf-8")
of_tested_release = pytest.mark.skipif(
    not IS_TESTED_RELEASE,
    reason="the sizes and the table of architectures are those of another release of transformers",
)
