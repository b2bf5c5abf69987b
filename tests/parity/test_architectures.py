"""Every causal language model of transformers: K/V is reused with the same answers, or a reason is given."""

import pytest
from huggingface_hub.errors import StrictDataclassError

from tests.architectures import NOT_BUILT, TRIED, make_architecture
from tests.architectures.outcome import check_context_matters, outcome_of
from tests.architectures.table import PAGE, class_name, page, recorded, row

# What architectures warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("model_type", TRIED)
def test_reuse_or_a_reason(model_type: str) -> None:
    model = make_architecture(model_type)
    found = row(model, outcome_of(model))
    written = recorded().get(type(model).__name__)
    assert found == written, (
        f"kvboost_hf/architectures.json says {written}. If the new row is right: make architectures"
    )


@pytest.mark.parametrize("model_type", NOT_BUILT)
def test_what_is_left_out_cannot_be_run(model_type: str) -> None:
    with pytest.raises((AssertionError, AttributeError, ImportError, ValueError, StrictDataclassError)):
        check_context_matters(make_architecture(model_type))


def test_the_page_shows_the_rows_and_no_row_is_too_many() -> None:
    rows = recorded()
    assert rows.keys() <= {class_name(name) for name in TRIED}
    assert PAGE.read_text(encoding="utf-8") == page(rows), "run make architectures"
