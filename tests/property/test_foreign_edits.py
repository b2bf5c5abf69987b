"""Ordinary calls and the edits of others, in any order: answers are plain, and so is every stored chunk."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility
from tests.conftest import as_inputs, make_model, random_ids
from tests.parity import test_never_poisoned as edits

_NAMES = ("llama", "mistral", "qwen3_next")
_models: dict[str, Any] = {}  # a model of each kind, and one that nobody touches


def models(name: str) -> Any:
    if name not in _models:
        _models[name] = make_model(name), make_model(name)
        check_model_compatibility(_models[name][0])
    return _models[name]


class ForeignEdits(RuleBasedStateMachine):
    """A cache, copies of it, and a text that grows, shrinks and parts."""

    @initialize(name=st.sampled_from(_NAMES), seed=st.integers(0, 3))
    def begin(self, name: str, seed: int) -> None:
        self.model, self.plain = models(name)
        self.store = ChunkStore(self.model, chunk_size=32)
        self.caches = [ChunkReuseCache(self.model, self.store)]
        self.text = random_ids(60, seed=seed)
        self.handles: list[Any] = []

    def any_cache(self, index: int) -> ChunkReuseCache:
        return self.caches[index % len(self.caches)]

    @rule(index=st.integers(0, 3), tokens=st.integers(1, 40))
    def ask(self, index: int, tokens: int) -> None:
        """One more turn; its text goes on with the answer."""
        given = as_inputs(self.text)
        cache = self.any_cache(index)
        found = self.model.generate(**given, past_key_values=cache, max_new_tokens=tokens)
        assert torch.equal(found, self.plain.generate(**given, max_new_tokens=tokens))
        self.text = found[:, :300]

    @rule(keep=st.integers(1, 200), seed=st.integers(0, 9), more=st.integers(0, 30))
    def part(self, keep: int, seed: int, more: int) -> None:
        """The text is another one from some token on."""
        self.text = torch.cat([self.text[:, :keep], random_ids(more, seed=seed)], dim=1)

    @rule(index=st.integers(0, 3), edit=st.sampled_from(edits.EDITS))
    def change(self, index: int, edit: Any) -> None:
        """Somebody edits a cache, or tries to."""
        try:
            edit(self.any_cache(index))
        except (AttributeError, TypeError, IndexError):  # there is nothing in it, or a layer has no keys
            return
        except RuntimeError as error:
            if "activate_past_recording" not in str(error):  # a window cannot go back to what has left it
                raise

    @rule(index=st.integers(0, 3))
    def copy(self, index: int) -> None:
        """A cache goes two ways from here."""
        if len(self.caches) < 4:
            self.caches.append(self.any_cache(index).fork())

    @rule()
    def another_cache(self) -> None:
        """A new one on the same store."""
        if len(self.caches) < 4:
            self.caches.append(ChunkReuseCache(self.model, self.store))

    @rule(index=st.integers(0, 3))
    def let_go(self, index: int) -> None:
        """A cache gives the store what it holds."""
        self.any_cache(index).reset()

    @rule(index=st.integers(0, 3))
    def store_everything(self, index: int) -> None:
        """As `warm` does."""
        self.any_cache(index).store_all()

    @precondition(lambda self: len(self.store) > 0)
    @invariant()
    def every_chunk_is_plain(self) -> None:
        """Compared with a forward of the model that nobody has touched."""
        assert self.store.check_integrity().wrong == 0


@pytest.mark.slow
def test_ordinary_calls_and_edits_in_any_order() -> None:
    ForeignEdits.TestCase.settings = settings(
        max_examples=40,
        stateful_step_count=14,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    ForeignEdits.TestCase().runTest()
