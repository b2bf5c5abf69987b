"""One round: a tree of drafts, a pass of the target over it, and what was learned of the two."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvboost_hf.assisted.branches import Branches
from kvboost_hf.assisted.growth import Growth
from kvboost_hf.assisted.stats import SpeculationStats
from kvboost_hf.assisted.tree import ROOT, Tree
from kvboost_hf.assisted.tree_draft import TreeDraft
from kvboost_hf.config import DraftTreeConfig


@dataclass(frozen=True, slots=True)
class Taken:
    """What a pass of the target has given.

    Args:
        path: Tokens of the tree that it says, too.
        committed: Tokens by which the text has grown.
    """

    path: list[int]
    committed: int

    @property
    def kept(self) -> list[int]:
        """The tokens of the tree whose K/V is needed: the last token of the text is computed later."""
        return self.path[: self.committed - 1]


def follow(tree: Tree, choose: Callable[[int], tuple[int, bool]]) -> Taken:
    """Go through a tree by what the target says, as far as it holds that, and one token further.

    Args:
        tree: Of drafts.
        choose: Given the number of a token of the tree, or `ROOT`: what the target says behind it, and whether that
            ends the text.
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
    """Rounds with one draft model, of one text after the other.

    Args:
        config: How large trees are.
        clock: Seconds.
    """

    def __init__(self, config: DraftTreeConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self.stats, self.growth, self.clock = SpeculationStats(), Growth(config), clock

    def run(
        self,
        branches: Branches,
        drafting: TreeDraft,
        ids: torch.Tensor,
        room: int,
        take: Callable[[Tree, torch.Tensor], Taken],
    ) -> Taken:
        """Draft, check, and keep what was taken.

        Args:
            branches: On what the target holds: all of the text but its last token.
            drafting: The draft of this text.
            ids: The text, [1, tokens].
            room: Tokens that may still come.
            take: Chooses by a tree and the logits [1 + tokens of the tree, vocab_size] behind the text and behind each
                of them.
        """
        began = self.clock()
        tree, nodes = Tree(), list[int]()
        if room > 1:  # the last token is the target's
            tree = drafting.grow(ids, room - 1)
            nodes = self.growth.chosen(tree)
            tree = tree.part(nodes)
        drafted = self.clock()
        logits = branches.forward([int(ids[0, -1]), *tree.tokens], [ROOT, *(parent + 1 for parent in tree.parents)])
        taken = take(tree, logits)
        verified = self.clock()
        branches.keep([0, *(node + 1 for node in taken.kept)])
        if nodes:
            drafting.keep([nodes[node] for node in taken.kept])
        self.note(tree, taken, drafting.passes, (began, drafted, verified, self.clock()))
        return taken

    def note(
        self,
        tree: Tree,
        taken: Taken,
        passes: int,
        clock: tuple[float, float, float, float],
        *,
        first: bool = False,
    ) -> None:
        """Count a round, and learn from it.

        Args:
            tree: That was checked.
            taken: What came of it.
            passes: Of the draft.
            clock: Before drafting, verifying and rolling back, and after it.
            first: Whether the target's pass took the prompt in, too.
        """
        if not len(tree):  # no room for drafts
            return
        draft_s, verify_s, rollback_s = (after - before for before, after in pairwise(clock))
        stats = self.stats
        stats.rounds += 1
        stats.drafted += len(tree)
        stats.accepted += len(taken.path)
        stats.committed += taken.committed
        stats.histogram[len(taken.path)] += 1
        stats.draft_s += draft_s
        stats.verify_s += verify_s
        stats.rollback_s += rollback_s
        self.growth.learn(
            tree,
            tree.children(),
            taken.path,
            committed=taken.committed,
            passes=passes,
            draft_s=draft_s,
            target_s=verify_s + rollback_s,
            first=first,
        )
