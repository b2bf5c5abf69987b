"""The phases of a task: `Prefill` computes prompts piece by piece, `Decoding` the answers, one token in a forward.

Answers may get several tokens in one forward, which `Speculation` chooses.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvboost_hf.assisted.hidden import TextStates
from kvboost_hf.assisted.tree import Tree
from kvboost_hf.cache.costs import free_columns
from kvboost_hf.cache.forward.admission import RIDING_SHARED
from kvboost_hf.server.engine.model_runner import ModelRunner
from kvboost_hf.server.engine.task import RowRepair, Task
from kvboost_hf.server.fair_share import FairTurns
from kvboost_hf.server.generation.batch import Again, BatchKV, KeysValues
from kvboost_hf.server.generation.speculation import (
    Add,
    AnswerDrafts,
    Drafts,
    PredictedText,
    RowDrafts,
    checking_reason,
)
from kvboost_hf.server.jobs import FinishReason

_PATIENCE = 4  # pieces of other prompts that the first prompt lets pass
Round = Callable[[Add], FinishReason | None]  # runs the forward, and returns why the answer ends with it


class Prefill:
    """The tasks whose prompts are being computed.

    Attributes:
        tasks: In the order in which they were added.
        pieces: Forwards so far.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.tasks: list[Task] = []
        self.pieces = 0
        self._runner = runner
        self._turns: FairTurns[bytes] = FairTurns()  # to have a piece computed

    def next(self) -> Task:
        """Of the client whose turn it is, the task of the smallest priority with the least left.

        The first task of that priority is not passed over more than `_PATIENCE` times.
        """
        turn = self._turns.order(task.job.client for task in self.tasks)[0]
        own = [task for task in self.tasks if task.job.client == turn]
        least = min(task.job.priority for task in own)
        own = [task for task in own if task.job.priority == least]
        chosen = own[0] if own[0].passed >= _PATIENCE else min(own, key=lambda task: task.left)
        for other in own:
            other.passed = 0 if other is chosen else other.passed + 1
        self._turns.charge(turn)
        return chosen

    def compute(self, task: Task, room: int, others: Sequence[Task]) -> tuple[int, torch.Tensor]:
        """Compute the next piece of a prompt, of `room` tokens at most where it can be cut.

        Returns how many tokens were computed, and the logits [1, vocab_size] of the last one. The caches of `others`
        may have the beginning of the prompt.
        """
        runner = self._runner
        ids, known = torch.tensor([task.to_compute], device=runner.device), task.done
        wants_all = task.job.options.prompt_logprobs and not task.resumed
        if task.cache is None:
            task.started = task.started or time.perf_counter()
            task.cache, shared = runner.open(task, () if wants_all else others)
            task.cache.in_own_loop = True
            if not wants_all:
                known = max(runner.look_up(task).filled, shared)
                task.spans = task.cache.movable_spans(ids, known)
        stop = _piece_end(known, room, task.spans, ids.shape[1]) if runner.in_pieces else ids.shape[1]
        if runner.one_by_one:
            prompt = len(task.job.ids)
            if task.done >= prompt:
                stop = task.done + 1
            elif stop >= prompt - 1:  # no single token of the prompt is left
                stop = prompt
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


class Decoding:
    """The tasks whose prompts are computed, and the batch that they run in.

    `last` are the layers whose hidden states drafts read of the last token of a row.

    Attributes:
        tasks: In the order of the batch's rows, and then those that are not in it.
    """

    def __init__(self, runner: ModelRunner, last: Sequence[int] = ()) -> None:
        self.tasks: list[Task] = []
        self._runner, self._last = runner, last
        self._batch = BatchKV(runner.model, in_place=runner.in_place)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the batch's buffers."""
        return self._batch.nbytes

    def arrange(self, *, drafted: bool) -> list[tuple[Task, Exception]]:
        """Put the tasks into the batch, or take a task out of it that runs better alone, such as one with drafts.

        Returns tasks that there was no memory for, with the errors; they are removed.
        """
        alone = len(self.tasks) == 1
        failed: list[tuple[Task, Exception]] = []
        if not self._runner.batchable:
            return failed
        if alone and (drafted or self._runner.in_place or not self._batch.lengths):
            moved, move = self.tasks[: len(self._batch.lengths)], self._leave_batch
        else:
            moved, move = self.tasks[len(self._batch.lengths) :], self._join_batch
        for task in moved:
            try:
                move(task)
            except Exception as error:
                failed.append((task, error))
                self.remove(task)
        return failed

    @property
    def groups(self) -> list[list[Task]]:
        """Tasks that are computed in one forward: all that run in the batch, and each one without a batch."""
        return [list(self.tasks)] if self._batch.lengths else [[task] for task in self.tasks]

    def step(self, group: Sequence[Task]) -> torch.Tensor:
        """Compute one more token of each task of a group; returns logits [tasks, vocab_size]."""
        if self._batch.lengths:
            return self._riding(partial(self._batch.step, [task.ids[-1] for task in group]))
        return torch.cat([self._runner.step(task) for task in group])

    @property
    def can_check(self) -> bool:
        """Whether several answers run in a batch that can check drafts of each."""
        return len(self._batch.lengths) == len(self.tasks) > 1 and self._batch.can_check

    def check(self, trees: Sequence[Tree]) -> torch.Tensor:
        """Compute the last token of each task and its chain of drafts; `keep` is to follow.

        Returns logits [tasks, 1 + tokens of the longest chain, vocab_size].
        """
        most = max(map(len, trees))
        rows = [[task.ids[-1], *tree.tokens] for task, tree in zip(self.tasks, trees, strict=True)]
        return self._riding(partial(self._batch.check, [row + row[-1:] * (1 + most - len(row)) for row in rows]))

    def _riding(self, run: Callable[[Sequence[Again]], torch.Tensor]) -> torch.Tensor:
        """Run a step of the batch, which takes some tokens along that moved chunks have left in its rows."""
        rows, batch = self.tasks[: len(self._batch.lengths)], self._batch
        if not any(task.repair for task in rows):
            return run(())
        if not batch.can_ride:
            for task in rows:
                task.riding_reason = RIDING_SHARED if task.repair is not None else None
            return run(())
        rides = any(task.repair is not None and task.repair.progressive == "ride" for task in rows)
        free = (free_columns(self._runner.model) + 1 - len(rows)) // len(rows) if rides else 0
        again, lengths = list[Again](), list(batch.lengths)
        for task, length in zip(rows, lengths, strict=True):
            start, stop = task.repair.next(length, max(free, 0)) if task.repair is not None else (length, length)
            again.append((start, [*task.job.ids, *task.ids][start:stop] if stop > start else []))
        logits = run(again)
        for task, length, (start, ids) in zip(rows, lengths, again, strict=True):
            if task.repair is not None and ids:
                task.repair.advance(start + len(ids), length)
        return logits

    def keep(self, counts: Sequence[int], columns: int) -> None:
        """Keep the first tokens of each task, of the columns of the last `check`."""
        self._batch.keep(counts, columns)

    def show(self, place: int, states: TextStates) -> None:
        """Have heads see what they have not seen yet of a row of the batch: hidden states of its text, and its K/V."""
        task, batch = self.tasks[place], self._batch
        length = batch.lengths[place]

        def read_kv(layers: Sequence[int]) -> list[KeysValues | None]:
            found = batch.read(place, length)
            return [found[layer] for layer in layers]

        states.read_kv = read_kv
        if not states.whole:
            states.append(batch.read_hidden(place, 1) if batch.can_read else {}, length)
            return
        states.cache = task.cache
        if states.stop < task.joined and task.cache is not None:
            before = task.cache.loans.read_hidden(states.layers, states.stop) or {}
            states.append({layer: found[:, : task.joined - states.stop] for layer, found in before.items()})
        if states.stop >= task.joined:
            states.append(batch.read_hidden(place, length - states.stop))

    def sync(self, task: Task) -> None:
        """Copy what the batch has computed for a task into the task's own cache."""
        place = self.tasks.index(task) if task in self.tasks else len(self._batch.lengths)
        if place >= len(self._batch.lengths) or task.cache is None:
            return
        new = self._batch.lengths[place] - task.joined
        if new:
            said = task.joined - len(task.job.ids)
            ids = torch.tensor([task.ids[said : said + new]], device=self._runner.device)
            positions = torch.arange(task.joined, task.joined + new, device=self._runner.device)[None]
            states, hidden = self._batch.read_states(place), self._batch.read_hidden(place, new)
            task.cache.loans.extend(ids, positions, self._batch.read(place, new), states, hidden=hidden)
        self._take_repaired(task, place)

    def _take_repaired(self, task: Task, place: int) -> None:
        """Have the task's own cache take over what steps of the batch have made exact."""
        repair, task.repair = task.repair, None
        if repair is None or task.cache is None or not repair.count:
            return
        length = self._batch.lengths[place]
        columns = repair.exact(length) - repair.start
        found = self._batch.read(place, length - repair.start)
        kv = [pair and (pair[0][:, :, :columns], pair[1][:, :, :columns]) for pair in found]
        task.cache.loans.take_repaired(repair.start, kv, repair.count)

    def remove(self, task: Task) -> None:
        """Remove a task; in the batch the last row takes the place of its row."""
        place = self.tasks.index(task)
        if (rows := len(self._batch.lengths)) > place:
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
        loans, tokens = task.cache.loans, [*task.job.ids, *task.ids[:-1]]
        rides, read = loans.rides_from, (loans.read(), tokens, owner, loans.read_states(), loans.kept_layers)
        self._batch.join(*read, self._last, rides=rides is not None)
        task.repair = RowRepair(*rides) if rides is not None else None

    def _leave_batch(self, task: Task) -> None:
        self.sync(task)
        self._batch.leave(0)


class Speculation:
    """Chooses how answers get several tokens in one forward."""

    def __init__(self, runner: ModelRunner, drafts: Drafts | None) -> None:
        self._runner, self._drafts = runner, drafts

    @property
    def figures(self) -> dict[str, float]:
        """Figures of all rounds of the draft model; none without one."""
        return self._drafts.figures if self._drafts is not None else {}

    @property
    def last(self) -> Sequence[int]:
        """The layers whose hidden states drafts read of the last token of a text only."""
        return self._drafts.last if self._drafts is not None else ()

    def note_step(self, tasks: int) -> None:
        """Note a step that gives each of so many tasks one token."""
        if self._drafts is not None and tasks > 1:
            self._drafts.note_shared(tasks)

    def round(self, task: Task) -> Round | None:
        """The next forward of an answer, if it may give several tokens; None for one token by plain decoding.

        A prediction comes before a draft model.
        """
        if (predicted := self._predicted(task)) and task.predicted is not None and task.cache is not None:
            return partial(task.predicted.run, task.cache, task.ids, predicted)
        if (drafts := self._drafts) is None or not drafts.take(task.job, len(task.ids)) or task.cache is None:
            return None
        text = self._drafted(task, drafts)
        return partial(text.run, task.cache, task.ids) if text is not None else None

    def rows(self, decoding: Decoding) -> RowDrafts | None:
        """Chains for the answers of a batch; None for a step of plain decoding."""
        tasks, drafts = decoding.tasks, self._drafts
        if drafts is None or not decoding.can_check:
            return None
        takes = [drafts.take(task.job, len(task.ids)) for task in tasks]
        texts = [
            self._drafted(task, drafts) if takes_it else None for task, takes_it in zip(tasks, takes, strict=True)
        ]
        return RowDrafts(drafts, texts, decoding.show)

    def _predicted(self, task: Task) -> list[int]:
        """The next tokens of an answer by its client's prediction; none where they cannot be checked."""
        job = task.job
        if not job.prediction or job.options.constraint is not None:
            return []
        if task.predicted is None:
            assert task.sampler is not None
            if checking_reason(self._runner.model, self._runner.lending_reason) is not None:
                return []
            task.predicted = PredictedText(self._runner.model, self._runner.device, job, task.sampler)
        return task.predicted.draft(task.ids)

    def _drafted(self, task: Task, drafts: Drafts) -> AnswerDrafts | None:
        """The drafting of a task's answer; None, and no drafts any more, where it cannot be made."""
        try:
            if task.drafted is None and task.sampler is not None:
                task.drafted = AnswerDrafts(drafts, task.job, task.sampler, self._runner.store)
        except Exception as error:
            drafts.give_up(error)
        return task.drafted
