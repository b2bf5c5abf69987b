"""Rounds over the rows of a batch: a draft for each, one pass over all, and as many tokens of each as are right."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from kvboost_hf.assisted.branches import Branches
from kvboost_hf.assisted.columns import Account, PassTimes
from kvboost_hf.assisted.hidden import TextStates, asking_for
from kvboost_hf.assisted.limits import end_tokens
from kvboost_hf.assisted.rounds import Drafter, Rounds, Taken
from kvboost_hf.assisted.text import DraftedText
from kvboost_hf.assisted.tree import ROOT, Tree
from kvboost_hf.compat import CACHE, running_streamer
from kvboost_hf.config import DraftTreeConfig

# Processors that look at each row alone, and keep nothing of it.
_ROW_BY_ROW = tuple(
    getattr(logits_process, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
        "WatermarkLogitsProcessor",
    )
    if hasattr(logits_process, name)
)
_ALONE = "Call generate() for each prompt, or without drafts."


def require_rows(processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> None:
    """Check that drafts for several rows can give the answers of plain `generate()`.

    Args:
        processors: Logits processors of the call.
        criteria: The stopping criteria of the call.

    Raises:
        ValueError: for what cannot be done row by row, and for a streamer.
    """
    for each in processors:
        if type(each) not in _ROW_BY_ROW:
            raise ValueError(
                f"Logits processors must look at one row at a time to draft for several rows, and a "
                f"{type(each).__name__} may not. {_ALONE}"
            )
    kinds = {type(each) for each in criteria if not _may_wait(each)}
    if others := kinds - {EosTokenCriteria, MaxLengthCriteria, StopStringCriteria}:
        names = ", ".join(sorted(kind.__name__ for kind in others))
        raise ValueError(
            f"Stopping criteria must end each row for itself to draft for several rows, and {names} may not. {_ALONE}"
        )
    if StopStringCriteria in kinds and EosTokenCriteria not in kinds:
        raise ValueError(
            "`stop_strings` need an `eos_token_id` to draft for several rows: without one, generate() lets rows go on "
            "until the last one ends. Pass `eos_token_id`."
        )
    if running_streamer() is not None:
        raise ValueError(f"`streamer` must be None for several rows, which get different numbers of tokens. {_ALONE}")


def columns_kept(model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The columns of a call that are no padding, [rows, columns], bool; None for all."""
    mask = model_kwargs.get("attention_mask")
    return mask.bool() if mask is not None and not mask.all() else None


def padding_of(ids: torch.Tensor, keep: torch.Tensor | None) -> list[int]:
    """How many ids of each row are padding.

    Args:
        ids: [rows, tokens].
        keep: [rows, columns], bool: the columns that are no padding, those that a cache holds before the ids included;
            None for all.
    """
    return [0] * len(ids) if keep is None else (~keep[:, -ids.shape[1] :]).sum(-1).tolist()


def _for_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors of a call, as they are for a row of its own."""
    found: Any = LogitsProcessorList()
    for each in processors:
        ignored = getattr(each, "prompt_ignore_length", None)  # one number for each row
        if isinstance(ignored, torch.Tensor):
            each = copy.copy(each)
            each.prompt_ignore_length = ignored[row : row + 1]
        found.append(each)
    return cast(LogitsProcessorList, found)


def _pad_token(config: Any) -> int:
    """What follows a row that has ended: as in generate(), the first token that ends one where there is no padding."""
    return next((int(pad) for pad in (config.pad_token_id, *end_tokens(config.eos_token_id)) if pad is not None), 0)


def _may_wait(criterion: Any) -> bool:
    """Whether a criterion of this package need not be asked at each token, and so not about all rows at once."""
    return bool(getattr(criterion, "once_a_round", False))


class RowRounds:
    """Runs rounds over batches, one batch after the other.

    Args:
        rounds: Has the statistics, and what is known of drafts.
        config: How large trees are.
    """

    def __init__(self, rounds: Rounds, config: DraftTreeConfig) -> None:
        self._rounds, self._config, self._times = rounds, config, PassTimes()

    def answer(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        drafter: Callable[[LogitsProcessorList, frozenset[int], TextStates | None], Drafter] | None,
        states: Sequence[TextStates] = (),
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Decode a batch, as `generate()` does.

        Args:
            model: The model.
            input_ids: [rows, tokens], with padding on the left.
            processors: Logits processors.
            criteria: Stopping criteria.
            config: The configuration of the call.
            model_kwargs: What generate() passes to the model.
            drafter: Makes the drafts of one row, given its logits processors, the tokens that end it, and its hidden
                states; None to decode without drafts, since the model keeps states.
            states: For each row, what takes the hidden states of its text; none for drafts that read none.
        """
        drafts = drafter is not None
        asked: Any = config
        keep, positions = columns_kept(model_kwargs), model_kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        pads = padding_of(input_ids, keep)
        seeds = torch.randint(2**62, (len(input_ids),)).tolist() if asked.do_sample else [None] * len(input_ids)
        own = [_for_row(processors, row) for row in range(len(input_ids))]
        texts = [
            DraftedText(ids, pad, criteria, each, asked, seed=seed)
            for ids, pad, each, seed in zip(input_ids, pads, own, seeds, strict=True)
        ]
        plain, ends = texts[0].is_plain, texts[0].ends
        generator: Any = model
        began = self._rounds.clock()
        whole = [each for each in states if each.whole]
        if whole:
            model_kwargs["output_hidden_states"] = asking_for(model, whole[0].layers)
        output = generator._prefill(input_ids, config, model_kwargs)
        cache = getattr(output, CACHE)
        for row, (each, pad) in enumerate(zip(whole, pads, strict=False)):
            each.append({layer: output.hidden_states[layer][row : row + 1, pad:] for layer in each.layers})
            each.cache, each.row = cache, row
        logits = output.logits[:, -1:]
        greedy = logits.argmax(-1).tolist() if plain else None
        for row, text in enumerate(texts):
            text.take(Tree(), logits[row], greedy[row] if greedy is not None else None)
        self._rounds.stats.plain += len(texts)
        self._times.learn_prompt(_computed(cache, input_ids), self._rounds.clock() - began)
        if drafts:
            cache.activate_past_recording()
        branches = Branches(model, cache, positions[..., -1:] + 1, keep, branching=drafts, states=states)
        read: Sequence[TextStates | None] = states or [None] * len(own)
        drafters = [drafter(each, ends, shown) for each, shown in zip(own, read, strict=True)] if drafter else []
        batch = _Batch(branches, texts, drafters, _pad_token(asked))
        account = Account(self._times, len(texts), min(text.room for text in texts))
        while batch.active:
            self._run(batch, account, plain=plain, drafts=drafts)
        if asked.return_dict_in_generate or getattr(cache, "_is_user_defined", True) or hasattr(cache, "loans"):
            batch.settle()
        found = torch.cat([input_ids, input_ids.new_tensor(batch.answers())], dim=1)
        if not asked.return_dict_in_generate:
            return found
        told: Any = {"sequences": found, CACHE: cache} | {name: batch.returned(name) for name in texts[0].returned}
        return GenerateDecoderOnlyOutput(**told)

    def _run(self, batch: "_Batch", account: Account, *, plain: bool, drafts: bool) -> None:
        """Run one round."""
        clock, fixed = self._rounds.clock, drafts and self._config.policy == "tree"
        began, before, active = clock(), batch.frontier, batch.active
        costs = [batch.cost(row) for row in active] if drafts else []
        drafting = fixed or (drafts and account.may_draft(costs))
        trees = {row: batch.draft(row) for row in active} if drafting else {}
        order = {row: tree.likeliest(self._config.max_nodes) for row, tree in trees.items()}
        if fixed:
            count = max(map(len, order.values()))
        else:
            chances = [
                sorted((tree.chances[node] for node in order[row]), reverse=True) for row, tree in trees.items()
            ]
            count = account.columns(chances, [batch.texts[row].length for row in active]) if drafting else 0
        nodes = {row: tree.likeliest(count) for row, tree in trees.items()}
        drafted = clock()
        even = not count and batch.branches.is_even
        taken = batch.run({row: trees[row].part(nodes[row]) for row in trees}, plain=plain)
        ended = clock()
        for row, found in taken.items():
            self._note(batch, row, trees.get(row), len(nodes.get(row, ())), found)
            if nodes.get(row):
                batch.drafters[row].keep([nodes[row][node] for node in found.kept])
        self._rounds.stats.draft_s += drafted - began if count else 0.0
        self._rounds.stats.verify_s += ended - drafted if count else 0.0
        account.note(
            0 if even else count + 1,
            batch.frontier - before,
            drafted - began if trees else 0.0,
            ended - drafted,
            [behind for _, behind in costs] if trees else (),
        )

    def _note(self, batch: "_Batch", row: int, tree: Tree | None, checked: int, taken: Taken) -> None:
        """Count a row's part of a round, and learn from it what drafts are worth, whether they were checked or not."""
        stats, text = self._rounds.stats, batch.texts[row]
        if checked:
            stats.add_round(checked, len(taken.path), taken.committed, (0.0, 0.0, 0.0))
        else:
            stats.plain += 1
        if tree is not None and len(tree):
            said = text.answer(text.length - taken.committed, text.length, 0)
            self._rounds.growth.compare(tree, said)


class _Batch:
    """The rows of one call.

    Args:
        branches: Behind the prompts.
        texts: The rows, each with its first token.
        drafters: Their drafts.
        pad: What follows a row that has ended.
    """

    def __init__(self, branches: Branches, texts: list[DraftedText], drafters: list[Drafter], pad: int) -> None:
        self.branches, self.texts, self.drafters, self._pad = branches, texts, drafters, pad

    @property
    def active(self) -> list[int]:
        """The rows that go on."""
        return [row for row, text in enumerate(self.texts) if not text.done]

    @property
    def frontier(self) -> int:
        """Passes of plain decoding that have led as far: those of the last row that goes on, or of the longest one."""
        lengths = [text.length for text in self.texts]
        return min((lengths[row] for row in self.active), default=max(lengths))

    def cost(self, row: int) -> tuple[float, int]:
        """What a draft behind a row is expected to take: see `Account.may_draft`."""
        drafter = self.drafters[row]
        return drafter.share, drafter.behind(self.texts[row].ids.shape[1])

    def draft(self, row: int) -> Tree:
        """The drafts behind a row."""
        text = self.texts[row]
        return self.drafters[row].grow(text.ids, text.room - 1) if text.room > 1 else Tree()

    def run(self, trees: dict[int, Tree], *, plain: bool) -> dict[int, Taken]:
        """Run a pass over the last token of each row and its tree, and keep what is accepted.

        Without any drafts, rows that are ahead wait for the others, so that a plain pass can follow.

        Args:
            trees: By row.
            plain: Whether the likeliest tokens are the answer.

        Returns:
            By row, the outcome; without those that wait.
        """
        branches, active, fed = self.branches, self.active, self.branches.lengths
        count = 1 + max(map(len, trees.values()), default=0)
        behind = [row for row in active if count > 1 or fed[row] == min(fed[at] for at in active)]
        if stepped := count == 1 and branches.is_even:
            logits = branches.step([self.texts[row].answer(at, at + 1, self._pad)[0] for row, at in enumerate(fed)])
        else:
            tokens, parents = [], list[Sequence[int]]()
            for row, at in enumerate(fed):
                if row in behind:
                    tree = trees.get(row, Tree())
                    tokens.append([self.texts[row].last, *tree.tokens])
                    parents.append([ROOT, *(parent + 1 for parent in tree.parents)])
                else:
                    tokens.append(self.texts[row].answer(at, at + count, self._pad))
                    parents.append(range(-1, count - 1))
            logits = branches.forward(tokens, parents)
        greedy = logits.argmax(-1).tolist() if plain else None  # the device is waited for once
        taken = {
            row: self.texts[row].take(trees.get(row, Tree()), logits[row], greedy[row] if greedy is not None else None)
            for row in behind
        }
        if not stepped:
            self._keep(taken, fed, count)
        return taken

    def _keep(self, taken: dict[int, Taken], fed: Sequence[int], count: int) -> None:
        """Keep what was accepted, and padding of rows that have ended, as far as one that goes on has come."""
        kept = {row: [0, *(node + 1 for node in found.kept)] for row, found in taken.items()}
        furthest = max(fed[row] + len(kept.get(row, ())) for row in {*self.active, *taken})
        paths = []
        for row, at in enumerate(fed):
            ended = row not in taken and self.texts[row].done
            paths.append(kept.get(row, list(range(max(min(count, furthest - at), 0))) if ended else []))
        self.branches.keep(paths)

    def settle(self) -> None:
        """Leave in the cache what plain decoding would have: of rows that ended early, padding behind their ends."""
        length = max(text.length for text in self.texts) - 1
        fed = self.branches.lengths
        missing = length - min(fed)
        if missing > 0:
            tokens = [text.answer(at, at + missing, self._pad) for text, at in zip(self.texts, fed, strict=True)]
            self.branches.forward(tokens, [range(-1, missing - 1)] * len(tokens))
            self.branches.keep([list(range(max(length - at, 0))) for at in fed])
        self.branches.settle(length)

    def returned(self, name: str) -> tuple[torch.Tensor, ...]:
        """What is returned of each token, [rows, vocab_size]; zeros for padding."""
        found = [text.returned[name] for text in self.texts]
        most = max(map(len, found))
        full = [row + [torch.zeros_like(row[0])] * (most - len(row)) for row in found]
        return tuple(torch.cat(each) for each in zip(*full, strict=True))

    def answers(self) -> list[list[int]]:
        """The answers, all as long as the longest."""
        most = max(text.length for text in self.texts)
        return [text.answer(0, most, self._pad) for text in self.texts]


def _computed(cache: Any, input_ids: torch.Tensor) -> int:
    """Tokens of the prompts that were computed: at least one for each row."""
    report = getattr(cache, "report", None)
    found = getattr(report, "forwarded_tokens", None)
    return int(found) if found else input_ids.numel()
