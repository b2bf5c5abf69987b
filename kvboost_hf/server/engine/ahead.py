"""`Ahead`: several tokens in one forward for an answer that runs alone, by its client's prediction or by a draft."""

from collections.abc import Callable, Sequence
from functools import partial

from kvboost_hf.assisted.branch_probe import branch_reason
from kvboost_hf.server.engine.model_runner import ModelRunner
from kvboost_hf.server.engine.task import Task
from kvboost_hf.server.generation.drafted import DraftedText, Drafts
from kvboost_hf.server.generation.predicted import Add, PredictedText
from kvboost_hf.server.jobs import FinishReason

Round = Callable[[Add], FinishReason | None]  # runs the forward, and returns why the answer ends with it


class Ahead:
    """Chooses how an answer that runs alone gets several tokens in one forward.

    Args:
        runner: Has the model.
        drafts: The draft model; None for no drafts.
    """

    def __init__(self, runner: ModelRunner, drafts: Drafts | None) -> None:
        self._runner, self._drafts = runner, drafts

    @property
    def figures(self) -> dict[str, float]:
        """Figures of all rounds of the draft model; none without one."""
        return self._drafts.figures if self._drafts is not None else {}

    def round(self, task: Task) -> Round | None:
        """The next forward of an answer, if it may give several tokens; None for one token by plain decoding.

        A prediction comes before a draft model.
        """
        if predicted := self._predicted(task):
            return partial(self._check, task, predicted)
        if self._drafts is not None and self._drafts.take(task.job):
            return partial(self._draft, task, self._drafts)
        return None

    def _predicted(self, task: Task) -> list[int]:
        """The next tokens of an answer by its client's prediction; none where they cannot be checked."""
        job = task.job
        if not job.prediction or job.options.constraint is not None or self._runner.lending_reason is not None:
            return []
        if task.predicted is None:
            assert task.sampler is not None
            if branch_reason(self._runner.model) is not None:
                return []
            task.predicted = PredictedText(self._runner.model, self._runner.device, job, task.sampler)
        return task.predicted.draft(task.ids)

    def _check(self, task: Task, predicted: Sequence[int], add: Add) -> FinishReason | None:
        assert task.cache is not None
        assert task.predicted is not None
        return task.predicted.run(task.cache, task.ids, predicted, add)

    def _draft(self, task: Task, drafts: Drafts, add: Add) -> FinishReason | None:
        assert task.cache is not None
        assert task.sampler is not None
        if task.drafted is None:
            task.drafted = DraftedText(drafts, task.job, task.sampler)
        return task.drafted.run(task.cache, task.ids, add)
