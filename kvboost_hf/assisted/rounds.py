"""A round: a draft model grows a tree, the target verifies it in one pass, and both are counted and learned from."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from kvboost_hf.assisted.branches import Branches
from kvboost_hf.assisted.chains import Chain, continuing, keeps_states
from kvboost_hf.assisted.limits import Pauses, learned_positions
from kvboost_hf.assisted.tree import FIRST_LEVELS, ROOT, Growth, Tree
from kvboost_hf.compat import CACHE, input_device, run_model
from kvboost_hf.config import DraftTreeConfig


@dataclass(frozen=True, slots=True)
class Taken:
    """The outcome of a target's pass over a tree."""

    path: list[int]  # indices of the accepted tokens of the tree
    committed: int  # tokens by which the text has grown

    @property
    def kept(self) -> list[int]:
        """The accepted tokens whose K/V is needed: that of the text's last token is computed later."""
        return self.path[: self.committed - 1]


def follow(tree: Tree, choose: Callable[[int], tuple[int, bool]]) -> Taken:
    """Follow the target's tokens through a tree, as far as it contains them, and one token further.

    Args:
        tree: The drafts.
        choose: Given the index of a token of the tree, or `ROOT`: the target's token behind it, and whether that ends
            the text.
    """
    children, path, committed, at = tree.children(), list[int](), 0, ROOT
    while True:
        token, ends = choose(at)
        committed += 1
        at = children.get(at, {}).get(token, ROOT)
        if at != ROOT:
            path.append(at)
        if at == ROOT or ends:
            return Taken(path, committed)


class Rounds:
    """Runs rounds with one draft model, for one text after the other.

    Args:
        config: How large trees are.
        clock: Seconds.
    """

    def __init__(self, config: DraftTreeConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self.stats, self.growth, self.clock = SpeculationStats(), Growth(config), clock

    def run(
        self,
        branches: Branches | Chain,
        drafting: "Drafter",
        ids: torch.Tensor,
        room: int,
        take: Callable[[Tree, torch.Tensor], Taken],
    ) -> Taken:
        """Draft, verify, and keep the accepted tokens.

        Args:
            branches: On the target's cache, which holds all of the text but its last token.
            drafting: The draft of this text.
            ids: The text, [1, tokens].
            room: Tokens that the text may still grow by.
            take: Accepts tokens of a tree, by the logits [1 + tokens of the tree, vocab_size] behind the text and
                behind each of them.
        """
        began = self.clock()
        tree, nodes = Tree(), list[int]()
        lag = branches.lag
        if room > 1 and lag <= self.growth.longest_lag:  # the last token is the target's
            tree = drafting.grow(ids, room - 1)
            nodes = self.growth.chosen(tree)
            tree = tree.part(nodes)
        drafted = self.clock()
        parents = [ROOT, *(parent + 1 for parent in tree.parents)]
        taken = take(tree, branches.forward([[int(ids[0, -1]), *tree.tokens]], [parents])[0])
        verified = self.clock()
        branches.keep([[0, *(node + 1 for node in taken.kept)]])
        if nodes:
            drafting.keep([nodes[node] for node in taken.kept])
        self.note(tree, taken, drafting.passes, (began, drafted, verified, self.clock()), carried=lag)
        return taken

    def note(
        self,
        tree: Tree,
        taken: Taken,
        passes: int,
        clock: tuple[float, float, float, float],
        *,
        first: bool = False,
        carried: int = 0,
    ) -> None:
        """Count a round, and learn from it.

        Args:
            tree: The tree that was verified.
            taken: The outcome.
            passes: Forwards of the draft.
            clock: Seconds before drafting, before verifying, before rolling back, and after it.
            first: Whether the target's pass included the prompt.
            carried: Tokens of the text that it computed again.
        """
        if not len(tree):  # no room for drafts
            self.stats.plain += 1
            return
        draft_s, verify_s, rollback_s = (after - before for before, after in pairwise(clock))
        self.stats.add_round(len(tree), len(taken.path), taken.committed, (draft_s, verify_s, rollback_s))
        self.growth.learn(
            tree,
            tree.children(),
            taken.path,
            committed=taken.committed,
            passes=passes,
            draft_s=draft_s,
            target_s=verify_s + rollback_s,
            first=first,
            carried=carried,
        )


class Drafter(Protocol):
    """Drafts trees for one answer."""

    passes: int  # of a draft model, for the last tree
    share: float  # of a pass of the target, that a draft is expected to take before any was measured

    def behind(self, length: int) -> int:
        """Tokens of a text of so many that are to be taken in before the next draft."""
        ...

    def grow(self, ids: torch.Tensor, room: int, *, chain: bool = False) -> Tree:
        """A tree, or a `chain`, behind `ids` [1, tokens], of at most `room` levels; empty where nothing is drafted."""
        ...

    def keep(self, path: Sequence[int]) -> None:
        """Take note of the accepted tokens of the last tree."""
        ...


class DraftSource(Protocol):
    """Computes what may follow the text of one answer, token by token."""

    branches: bool  # several tokens may follow the same one
    share: float  # of a pass of the target, that one of the source is expected to take before any was measured

    def room(self, length: int, most: int) -> int:
        """How many tokens can be drafted behind so many, at most `most`."""
        ...

    def behind(self, length: int) -> int:
        """As `Drafter.behind`."""
        ...

    def begin(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Logits [1, vocab_size] behind `ids` [1, tokens]; None where there can be no draft."""
        ...

    def forward(self, tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """Add tokens; returns logits [tokens, vocab_size] behind them.

        Args:
            tokens: Their ids.
            parents: The index of each token's parent, counted from the first token since `begin`, or `ROOT`.
        """
        ...

    def keep(self, path: Sequence[int]) -> None:
        """Take note of those of the tokens that are in the text now, by their indices."""
        ...


class ModelSource:
    """Continues a text by a draft model, with its K/V of it.

    Args:
        draft: The draft model.
        share: The time of a pass of the draft, over that of a pass of the target, as expected.
    """

    def __init__(self, draft: PreTrainedModel, share: float = 0.0) -> None:
        self.share = share
        self.branches = not keeps_states(draft)
        self._draft, self._pauses = draft, Pauses(learned_positions(draft))
        self._cache: Any = DynamicCache(config=draft.config.get_text_config(decoder=True))
        self._branches: Branches | Chain | None = None
        self._held = 0  # tokens in the cache

    def behind(self, length: int) -> int:
        """As `DraftSource.behind`."""
        return length - self._held

    def begin(self, ids: torch.Tensor) -> torch.Tensor:
        """As `DraftSource.begin`."""
        model = self._draft
        ids = ids.to(input_device(model))
        output = run_model(model, ids[:, self._held :], self._cache)
        if getattr(output, CACHE) is not self._cache or not self._held:  # a model with attach() brings its own
            self._cache = getattr(output, CACHE)
            self._cache.activate_past_recording()
        self._held = ids.shape[1]
        self._cache.crop(0)  # layers with a window let go of what has left it
        self._branches = continuing(model, self._cache, torch.tensor([[ids.shape[1]]], device=ids.device))
        logits: torch.Tensor = output.logits[0, -1:]
        return logits

    def forward(self, tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """As `DraftSource.forward`."""
        assert self._branches is not None
        logits: torch.Tensor = self._branches.forward([tokens], [parents])[0]
        return logits

    def keep(self, path: Sequence[int]) -> None:
        """Keep the K/V of these tokens."""
        assert self._branches is not None
        self._held += self._branches.keep([path])

    def room(self, length: int, most: int) -> int:
        """How many tokens can be drafted behind so many, at most `most`."""
        return self._pauses.room(length, most)


class TreeDraft:
    """Drafts trees for one answer.

    Args:
        source: Computes what may follow its text.
        config: The largest tree.
        growth: Decides how far trees grow.
        processors: Logits processors of the target.
        ends: Tokens that end a text.
        chains: Draft chains only, as for a target with states.
    """

    def __init__(
        self,
        source: DraftSource,
        config: DraftTreeConfig,
        growth: Growth,
        processors: LogitsProcessorList,
        ends: frozenset[int],
        *,
        chains: bool = False,
    ) -> None:
        self.passes = 0  # of the draft, for the last tree
        self.share = source.share * min(config.depth, FIRST_LEVELS)
        self._source, self._growth, self._ends = source, growth, ends
        self._processors: Any = processors
        self._chains = chains or config.policy == "chain" or not source.branches
        self._width, self._branching = (1, 1) if self._chains else (config.width, config.branching)
        self._computed: dict[int, int] = {}  # by index in the tree, the index in the source of tokens with K/V

    def behind(self, length: int) -> int:
        """As `Drafter.behind`."""
        return self._source.behind(length)

    @torch.no_grad()
    def grow(self, ids: torch.Tensor, room: int, *, chain: bool = False) -> Tree:
        """Grow a tree, or a `chain`, behind `ids` [1, tokens], of at most `room` levels.

        Where the source cannot draft it stays empty.
        """
        self.passes = 0
        room = self._source.room(ids.shape[1], room)
        logits = self._source.begin(ids) if room > 0 else None
        if logits is None:
            return Tree()
        self._computed, self.passes = {}, 1
        ids = ids.to(logits.device)
        chain = chain or self._chains
        tree, behind = Tree(), [ROOT]
        level = 0
        while True:
            level += 1
            children = self._add_children(tree, ids, behind, logits, 1 if chain else self._branching)
            order = sorted(children, key=lambda node: -tree.chances[node])[: self._width]
            behind = sorted(node for node in order if tree.tokens[node] not in self._ends)
            if level >= room or not self._growth.goes_on([tree.chances[node] for node in behind], level, chain=chain):
                return tree
            parents = [self._computed.get(tree.parents[node], ROOT) for node in behind]
            first = len(self._computed)
            logits = self._source.forward([tree.tokens[node] for node in behind], parents)
            self._computed |= {node: first + place for place, node in enumerate(behind)}
            self.passes += 1

    def keep(self, path: Sequence[int]) -> None:
        """Keep the K/V of accepted tokens of the last tree, as far as it was computed."""
        self._source.keep([self._computed[node] for node in path if node in self._computed])

    def _add_children(
        self, tree: Tree, ids: torch.Tensor, behind: Sequence[int], logits: torch.Tensor, branching: int
    ) -> list[int]:
        """Add the likeliest children of each token, by its `logits` [tokens, vocab_size]; returns their indices."""
        scores = logits.float()
        if len(self._processors):
            paths = [[tree.tokens[node] for node in tree.path(at)] for at in behind]
            texts = [torch.cat([ids, ids.new_tensor([path])], dim=1) if path else ids for path in paths]
            rows = [self._processors(text, score[None]) for text, score in zip(texts, scores, strict=True)]
            scores = torch.cat(rows)
        found = scores.softmax(-1).topk(min(branching, scores.shape[-1]))
        children: list[int] = []
        for parent, tokens, odds in zip(behind, found.indices.tolist(), found.values.tolist(), strict=True):
            chance = tree.chances[parent] if parent != ROOT else 1.0
            for token, probability in zip(tokens, odds, strict=True):
                rate = self._growth.calibration.rate(probability)
                if probability > 0:
                    children.append(tree.add(token, parent, chance * rate, probability))
        return children


@dataclass(slots=True, kw_only=True)
class SpeculationStats:
    """Counts and times of rounds: a draft, and the target's pass that verifies it.

    The last round of an answer is counted when the answer is complete, if `generate()` ran on the target that the
    draft was prepared for; otherwise its outcome is unknown and it is left out. A round that ends its answer with a
    drafted token has no token of the target's own.

    Args:
        rounds: Number of rounds.
        drafted: Tokens drafted.
        accepted: Drafted tokens that the target accepted.
        committed: Tokens that rounds have appended to answers, those of the target included.
        histogram: By number of accepted tokens, the number of rounds.
        draft_s: Seconds of drafting.
        verify_s: Seconds of verifying on the host: the target's pass and its sampling.
        rollback_s: Seconds of removing K/V of rejected tokens from the target's cache.
        plain: Passes of the target without a draft, each of which has appended one token. Not counted with
            `assistant_model`.
        text_computed: Columns of texts, before their first drafts, that heads with K/V of their own have computed.
        text_reused: Columns there that heads have not computed, because their K/V was stored. Both are counted for the
            heads, whoever runs rounds with them.
        text_reason: Why nothing was served or is kept of the last of these texts; None if something may be.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    draft_s: float = 0.0
    verify_s: float = 0.0
    rollback_s: float = 0.0
    plain: int = 0
    text_computed: int = 0
    text_reused: int = 0
    text_reason: str | None = None

    @property
    def passes_per_token(self) -> float:
        """Passes of the target per token of the answers, those over prompts included; 1.0 if there was none."""
        tokens = self.committed + self.plain
        return (self.rounds + self.plain) / tokens if tokens else 1.0

    @property
    def target_s(self) -> float:
        """Seconds of verifying and rolling back."""
        return self.verify_s + self.rollback_s

    @property
    def acceptance(self) -> float:
        """Accepted tokens per drafted one; 0.0 if there was none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def committed_per_round(self) -> float:
        """Committed tokens per round; 0.0 if there was none."""
        return self.committed / self.rounds if self.rounds else 0.0

    def add_round(self, drafted: int, accepted: int, committed: int, seconds: tuple[float, float, float]) -> None:
        """Count a round, with its `seconds` of drafting, verifying and rolling back."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.committed += committed
        self.histogram[accepted] += 1
        self.draft_s += seconds[0]
        self.verify_s += seconds[1]
        self.rollback_s += seconds[2]

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, {self.acceptance:.0%} of {self.drafted} drafted tokens accepted, "
            f"{self.committed_per_round:.2f} tokens a round, {self.draft_s:.2f} s drafting, {self.verify_s:.2f} s "
            f"verifying, {self.rollback_s:.2f} s rolling back"
        )
