"""Ranks: processes that compute one model together (`tp_plan`), each with a part of its weights and of its K/V.

Every rank must run the same forwards over the same columns: a rank that runs another one waits for others for ever, or
is aborted. So nothing that decides of a forward may be decided by one rank alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from transformers import PreTrainedModel

from kvboost_hf.compat.models import input_device
from kvboost_hf.errors import RankError

_WORDS = 32  # of the first message of each agreement: so many in any case, for a rank that fails tells it there
_FAILED = -(2**62)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a model, seen from one of them. All must call the same methods in the same order."""

    rank: int  # the number of this one, from 0
    size: int  # how many there are
    group: Any  # their process group
    device: torch.device  # where their messages are, which the backend of the group decides

    def least(self, values: Sequence[int]) -> list[int]:
        """The least of each value over all ranks, which must give equally many.

        Raises:
            RankError: Another rank has failed on its way here, or is gone.
        """
        head = self._reduce([0, *values[: _WORDS - 1]], _WORDS)
        if head[0] == _FAILED:
            raise RankError(
                f"Another of the {self.size} ranks has failed before a forward that all were to run, so that rank "
                f"{self.rank} cannot run it either. Its error says why. Nothing of this prompt was stored."
            )
        rest = values[_WORDS - 1 :]
        return [*head[1:], *(self._reduce(rest, len(rest)) if rest else ())][: len(values)]

    def all(self, value: bool) -> bool:
        """Whether something holds at all ranks."""
        return bool(self.least([int(value)])[0])

    def agree(self, value: int) -> tuple[int, bool]:
        """The least of a value over all ranks, and whether it is the same at all."""
        low, high = self.least([value, -value])
        return low, low == -high

    @contextmanager
    def together(self) -> Iterator[None]:
        """If this rank fails inside, all others raise a RankError where they wait for it next."""
        try:
            yield
        except RankError:
            raise
        except BaseException:
            self._reduce([_FAILED], _WORDS)
            raise

    def _reduce(self, values: Sequence[int], words: int) -> list[int]:
        message = torch.zeros(words, dtype=torch.int64, device=self.device)
        message[: len(values)] = torch.tensor(values, dtype=torch.int64)
        try:
            distributed.all_reduce(message, distributed.ReduceOp.MIN, self.group)
            return [int(value) for value in message.tolist()]
        except RuntimeError as error:
            raise RankError(
                f"Rank {self.rank} of {self.size} cannot reach another rank, which has probably ended: {error}. Start "
                "all ranks again. What they have stored in tiers is found then."
            ) from error


def ranks_of(model: PreTrainedModel) -> Ranks | None:
    """The ranks that compute a model together; None for a model that one process computes alone."""
    size = getattr(model, "tp_size", None)
    if not size or size < 2:
        return None
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    mesh: Any = next((mesh for mesh in meshes if mesh is not None and mesh.size() == size), None)
    group = mesh.get_group() if mesh is not None and mesh.ndim == 1 else distributed.group.WORLD
    if (found := distributed.get_world_size(group)) != size:
        raise ValueError(
            f"The model must have a process group of {size} ranks, its `tp_size`, but {found} processes were found. "
            "Load it with from_pretrained(tp_plan='auto') in as many processes."
        )
    return Ranks(distributed.get_rank(group), size, group, input_device(model))


def require_one_process(model: PreTrainedModel, what: str) -> None:
    """Raise ValueError for a model of several ranks, with which `what` cannot be: each would decide for itself."""
    if (ranks := ranks_of(model)) is not None:
        raise ValueError(
            f"{what} cannot be had with a model that {ranks.size} ranks compute (tp_plan): each of them would "
            "decide for itself what to compute. Go on without, or load the model in one process."
        )
