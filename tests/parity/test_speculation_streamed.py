"""What drafts gain on a simulated link: passes times their copies, less what the draft hides."""

from dataclasses import dataclass
from typing import Any

import pytest

from kvboost_hf import load_assistant, streaming_stats
from kvboost_hf.assets import load_embedded_draft
from recipes.evaluate_draft import assisted_answer, held_out_prompts
from tests.speculation import LENGTH, Reader

PROMPTS = 6
ENOUGH = 0.95  # of the bound


@dataclass(frozen=True, slots=True)
class Times:
    """In forwards of the draft, of which each takes one second."""

    plain: float
    assisted: float
    rounds: int
    committed: int
    drafted: int  # tokens that came to the target
    forwards: int  # of the draft

    def bound(self, pass_s: float) -> float:
        """Tokens of a round, over the passes that a round takes."""
        return self.committed * pass_s / (self.rounds * pass_s + self.drafted)


def measure(pass_s: float, schedule: Any, misled: bool = False) -> Times:
    reader = Reader("sdpa", streamed=True, pass_s=pass_s)
    backend, prompts = reader.backend, held_out_prompts(reader.tokenizer, PROMPTS, seed=2)
    expected = [reader.answer(prompt) for prompt in prompts]
    tokens = sum(ids.shape[1] - prompt.shape[1] for ids, prompt in zip(expected, prompts, strict=True))
    plain = backend.clock
    assert plain == pytest.approx((tokens + 0.5) * pass_s)  # all three layers once, then two in each pass
    draft = load_embedded_draft()
    forwards = [0]

    def drafted(_: Any, args: Any, output: Any) -> None:
        forwards[0] += 1
        backend.advance(1.0)
        if misled:
            output.logits.neg_()

    draft.register_forward_hook(drafted)
    clock = {"clock": lambda: backend.clock}
    assistant = load_assistant(draft, target=reader.model, schedule=schedule, num_assistant_tokens=LENGTH, **clock)  # type: ignore[arg-type]
    rounds = []
    for prompt, ids in zip(prompts, expected, strict=True):
        said, found = assisted_answer(reader.model, assistant, prompt, max_new_tokens=24)
        assert said == ids[0, prompt.shape[1] :].tolist()
        rounds += found
    stats = streaming_stats(reader.model)
    assert stats is not None
    assert stats.misses == 1  # the very first
    assert stats.layer_calls == 3 * (tokens + len(rounds))
    committed, count = sum(each.committed for each in rounds), sum(each.drafted for each in rounds)
    assert committed == tokens
    return Times(plain, backend.clock - plain, len(rounds), committed, count, forwards[0])


@pytest.mark.parametrize("schedule", ["adaptive", "constant"])
@pytest.mark.parametrize("pass_s", [10.0, 60.0])
def test_the_bound_is_reached(schedule: str, pass_s: float) -> None:
    found = measure(pass_s, schedule)
    speed_up = found.plain / found.assisted
    assert speed_up >= ENOUGH * found.bound(pass_s)
    assert speed_up > 1.8
    shown = found.rounds * pass_s + found.forwards
    assert found.plain / shown >= 0.9 * found.bound(pass_s)  # in vain only
    assert found.rounds * pass_s * 0.99 <= found.assisted <= shown
    assert found.assisted >= shown - found.rounds * pass_s / 2  # no more than the copy into the free slot is hidden
    assert found.forwards - found.drafted <= 3 * PROMPTS  # in vain, behind the ends of texts


def test_a_draft_that_is_wrong_costs_what_is_not_hidden() -> None:
    found = measure(5.0, "constant", misled=True)
    assert found.rounds == found.committed
    assert found.assisted == pytest.approx(found.forwards + found.rounds * 2.5)
    assert found.plain / found.assisted < 0.72
