"""`Prefill`: computes the prompts of tasks piece by piece; clients take turns, and short prompts come first."""

import time
from collections.abc import Iterable, Sequence

import torch

from kvboost_hf.server.engine.model_runner import ModelRunner
from kvboost_hf.server.engine.task import Task

_PATIENCE = 4  # pieces of other prompts that the first prompt lets pass


class Prefill:
    """The tasks whose prompts are being computed.

    Args:
        runner: Runs the model.

    Attributes:
        tasks: In the order in which they were added.
        pieces: Forwards so far.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.tasks: list[Task] = []
        self.pieces = 0
        self._runner = runner
        self._last_pieces: dict[bytes, int] = {}  # by client: when it last had a piece computed, in pieces

    def add(self, tasks: Iterable[Task]) -> None:
        """Add tasks behind the others."""
        self.tasks += tasks

    def next(self) -> Task:
        """Of the client whose turn it is, the task of the smallest priority with the least left.

        The first task of that priority is not passed over more than `_PATIENCE` times.
        """
        turn = min(self.tasks, key=lambda task: self._last_pieces.get(task.job.client, 0)).job.client
        own = [task for task in self.tasks if task.job.client == turn]
        least = min(task.job.priority for task in own)
        own = [task for task in own if task.job.priority == least]
        chosen = own[0] if own[0].passed >= _PATIENCE else min(own, key=lambda task: task.left)
        for other in own:
            other.passed = 0 if other is chosen else other.passed + 1
        self._last_pieces[turn] = self.pieces + 1
        return chosen

    def remove(self, task: Task) -> None:
        """Remove a task."""
        self.tasks.remove(task)

    def clear(self) -> None:
        """Remove all tasks."""
        self.tasks.clear()

    def compute(self, task: Task, room: int, others: Sequence[Task]) -> tuple[int, torch.Tensor]:
        """Compute the next piece of a prompt.

        Args:
            task: Whose prompt it is.
            room: Tokens to compute, at most, where the prompt can be cut.
            others: Tasks whose caches may have the beginning of the prompt.

        Returns:
            How many tokens were computed, and the logits [1, vocab_size] of the last one.
        """
        runner = self._runner
        ids, known = torch.tensor([task.job.ids], device=runner.device), task.done
        wants_all = task.job.options.prompt_logprobs
        if task.cache is None:
            task.started = time.perf_counter()
            task.cache, shared = runner.open(task, () if wants_all else others)
            task.cache.in_own_loop = True
            if not wants_all:
                known = max(task.cache.stored_tokens(ids), shared)
                task.spans = task.cache.movable_spans(ids, known)
        stop = _piece_end(known, room, task.spans, len(task.job.ids)) if runner.in_pieces else len(task.job.ids)
        piece = ids[:, task.done : stop]
        if wants_all:
            kept = runner.forward_all(task.cache, piece, task.done)
            task.score_prompt(kept[0])
            logits = kept[:, -1]
        else:
            logits = runner.forward(task.cache, piece, task.done)
        task.done = stop
        self.pieces += 1
        return stop - known, logits


def _piece_end(start: int, room: int, spans: Sequence[tuple[int, int]], end: int) -> int:
    """Where a piece from `start` on ends: behind `room` tokens, those of `spans` not counted, and not in a span."""
    at, left = start, room
    for begin, stop in spans:
        if stop > at:
            if begin - at >= left:
                break
            left -= max(begin - at, 0)
            at = stop
    return min(at + left, end)
