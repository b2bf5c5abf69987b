"""`Decoding`: the tasks that are being answered, in one batch or each with a cache of its own."""

import torch

from kvboost_hf.server.engine.model_runner import ModelRunner
from kvboost_hf.server.engine.task import Task
from kvboost_hf.server.generation.batch import BatchKV


class Decoding:
    """The tasks whose prompts are computed, and the batch that they run in.

    Args:
        runner: Runs the model.

    Attributes:
        tasks: In the order of the batch's rows, and then those that are not in it.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.tasks: list[Task] = []
        self._runner = runner
        self._batch = BatchKV(runner.model, in_place=runner.in_place)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the batch's buffers."""
        return self._batch.nbytes

    def add(self, task: Task) -> None:
        """Add a task whose prompt is computed and whose first token is about to be chosen."""
        self.tasks.append(task)

    def arrange(self, *, drafted: bool) -> list[tuple[Task, Exception]]:
        """Put the tasks into the batch, or take a task out of it that runs better alone.

        Args:
            drafted: Whether the only task is about to be drafted for.

        Returns:
            Tasks that there was no memory for, with the errors; they are removed.
        """
        alone = len(self.tasks) == 1
        failed: list[tuple[Task, Exception]] = []
        if not self._runner.batchable:
            return failed
        if alone and (drafted or self._runner.in_place or not len(self._batch)):
            moved, move = self.tasks[: len(self._batch)], self._leave_batch
        else:
            moved, move = self.tasks[len(self._batch) :], self._join_batch
        for task in moved:
            try:
                move(task)
            except Exception as error:
                failed.append((task, error))
                self.remove(task)
        return failed

    def step(self) -> torch.Tensor:
        """Compute one more token of each task; returns logits [tasks, vocab_size]."""
        if len(self._batch):
            return self._batch.step([task.ids[-1] for task in self.tasks])
        return torch.cat([self._runner.step(task) for task in self.tasks])

    def sync(self, task: Task) -> None:
        """Copy what the batch has computed for a task into the task's own cache."""
        place = self.tasks.index(task) if task in self.tasks else len(self._batch)
        if place >= len(self._batch) or task.cache is None:
            return
        new = self._batch.length(place) - task.joined
        if new:
            said = task.joined - len(task.job.ids)
            ids = torch.tensor([task.ids[said : said + new]], device=self._runner.device)
            positions = torch.arange(task.joined, task.joined + new, device=self._runner.device)[None]
            task.cache.extend(ids, positions, self._batch.read(place, new))

    def remove(self, task: Task) -> None:
        """Remove a task; in the batch the last row takes the place of its row."""
        place = self.tasks.index(task)
        if (rows := len(self._batch)) > place:
            self._batch.leave(place)  # first: if it fails, the task is still there to be told
            self.tasks[place] = self.tasks[rows - 1]
            place = rows - 1
        del self.tasks[place]

    def clear(self) -> None:
        """Remove all tasks, whatever state the batch was left in."""
        self.tasks.clear()
        self._batch.clear()

    def _join_batch(self, task: Task) -> None:
        assert task.cache is not None
        task.joined = task.length  # the last token is computed next
        # Moved chunks are computed for the one text that they are in.
        owner = task.job.salt if task.cache.policy.mode == "exact" else task
        self._batch.join(task.cache.read(), [*task.job.ids, *task.ids[:-1]], owner)

    def _leave_batch(self, task: Task) -> None:
        self.sync(task)
        self._batch.leave(0)
