"""Loads the models of a run: one for each attention, streamed or not, shared by the arms that use it."""

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from kvboost_hf.bench.count import ForwardCount
from kvboost_hf.bench.source import ModelSource


class Counted(NamedTuple):
    """A model, and the count of its forwards."""

    model: PreTrainedModel
    forwards: ForwardCount


class Models:
    """Loads models when they are first asked for.

    Args:
        source: Where they come from.
        folder: For the files of streamed layers.
    """

    def __init__(self, source: ModelSource, folder: Path) -> None:
        self.source, self.folder = source, folder
        self._loaded: dict[tuple[str | None, bool], Counted] = {}

    def get(self, attention: str | None = None, *, streamed: bool = False) -> Counted:
        """The model that computes in this way.

        Args:
            attention: Its attention implementation; None for the default one.
            streamed: Whether its layers are streamed.
        """
        if (attention, streamed) not in self._loaded:
            source = self.source
            model = source.load_streamed(self.folder, attention) if streamed else source.load(attention)
            self._loaded[attention, streamed] = Counted(model, ForwardCount(model))
        return self._loaded[attention, streamed]
