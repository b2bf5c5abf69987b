"""A round: grow a tree of drafts, verify it in one pass of the target, and learn from both."""

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
    """The outcome of a target's pass over a tree.

    Args:
        path: Indices of the accepted tokens of the tree.
        committed: Tokens by which the text has grown.
    """

    path: list[int]
    committed: int

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
        branches: Branches,
        drafting: TreeDraft,
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
            tree: The tree that was verified.
            taken: The outcome.
            passes: Of the draft.
            clock: Seconds before drafting, before verifying, before rolling back, and after it.
            first: Whether the target's pass included the prompt.
        """
        if not len(tree):  # no room for drafts
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
        )
