"""Every causal language model of transformers: K/V is reused with the same answers, or a reason is given."""

import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaForCausalLM

from tests.architectures import BROKEN_SINCE, NOT_BUILT, TRIED, arguments, make_architecture
from tests.architectures.outcome import check_context_matters, check_outputs, outcome_of
from tests.architectures.table import IS_TESTED_RELEASE, PAGE, class_name, of_tested_release, page, recorded, row

# What architectures warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def test_the_table_is_that_of_the_tested_release() -> None:
    (release,) = re.findall(r"^transformers==(.+)$", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    assert f"transformers {release}," in PAGE.read_text("utf-8"), "run make architectures"


@pytest.mark.parametrize("model_type", TRIED)
def test_reuse_or_a_reason(model_type: str) -> None:
    """With another release than that of the table, the answers alone: fewer architectures may reuse K/V there."""
    if IS_TESTED_RELEASE:
        check_row(model_type)
        return
    try:
        model = make_architecture(model_type)
        check_context_matters(model)
    except Exception as error:
        pytest.skip(f"not to be made of the sizes of the tested release: {error}")
    outcome_of(model)


@pytest.mark.parametrize("model_type", [name for name in BROKEN_SINCE if name in TRIED])
def test_what_a_later_release_has_broken(model_type: str) -> None:
    """Its row is that of releases before, and says so."""
    check_row(model_type, before=BROKEN_SINCE[model_type][0])


def check_row(model_type: str, **more: str) -> None:
    model = make_architecture(model_type)
    check_outputs(model)
    found = row(model, outcome_of(model)) | more
    written = recorded().get(type(model).__name__)
    assert found == written, (
        f"kvboost_hf/architectures.json says {written}. If the new row is right: make architectures"
    )


@of_tested_release
@pytest.mark.parametrize("model_type", NOT_BUILT)
def test_what_is_left_out_cannot_be_run(model_type: str) -> None:
    with pytest.raises((AssertionError, AttributeError, ImportError, ValueError, StrictDataclassError)):
        check_context_matters(make_architecture(model_type))


@of_tested_release
def test_the_page_shows_the_rows_and_no_row_is_too_many() -> None:
    rows = recorded()
    assert rows.keys() <= {class_name(name) for name in TRIED}
    assert PAGE.read_text(encoding="utf-8") == page(rows), "run make architectures"


def test_each_argument_of_a_forward_is_known() -> None:
    """What a release adds would be taken for something that K/V depends on, and cost reuse where it is passed."""
    now, known = arguments.found(), arguments.table()
    assert now.keys() <= known.keys(), (
        f"Forwards of transformers {arguments.RELEASE} get {sorted(now.keys() - known.keys())}, which are not in "
        f"{arguments.TABLE.name}. Read what each does to K/V. If it leaves K/V alone, add it to LEAVE_KV_ALONE in "
        "kvboost_hf/cache/prompt/__init__.py. Then write the table: python -m tests.architectures.arguments"
    )
    written = {name: row[arguments.RELEASE] for name, row in known.items() if arguments.RELEASE in row}
    assert written in ({}, now), "run python -m tests.architectures.arguments"
    gone = arguments.of_newest_release() - now.keys()
    assert written or not gone, (
        f"Forwards of transformers {arguments.RELEASE} get no {sorted(gone)} any more, which the newest release in "
        f"{arguments.TABLE.name} has. Find in kvboost_hf/cache/prompt what reads them, and whether another argument "
        "has taken their place. Then write the table: python -m tests.architectures.arguments"
    )


def test_an_argument_that_a_release_adds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, new_argument: Any = None) -> None: ...

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(AssertionError, match="new_argument"):
        test_each_argument_of_a_forward_is_known()


def test_the_table_of_arguments_says_what_the_code_takes_them_for() -> None:
    rows = arguments.table()
    assert {name: row["effect"] for name, row in rows.items()} == {name: arguments.effect(name) for name in rows}
    assert {rows[name]["effect"] for name in ("input_ids", "return_dict", "pixel_values", "is_causal")} == {
        "read",
        "leaves K/V alone",
        "read with images, sound or video",
        "K/V may depend on it",
    }
