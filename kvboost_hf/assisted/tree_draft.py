"""Grows a tree of drafts behind a text, level by level, each in one pass of the draft model."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from kvboost_hf.assisted.branches import Branches
from kvboost_hf.assisted.growth import Growth
from kvboost_hf.assisted.pauses import Pauses, learned_positions
from kvboost_hf.assisted.tree import ROOT, Tree
from kvboost_hf.compat import CACHE, input_device, run_model
from kvboost_hf.config import DraftTreeConfig


class TreeDraft:
    """Drafts trees for one answer, with the draft model's K/V of it.

    Args:
        draft: The draft model.
        config: The largest tree.
        growth: Decides how far trees grow.
        processors: Logits processors of the target.
        ends: Tokens that end a text.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        config: DraftTreeConfig,
        growth: Growth,
        processors: LogitsProcessorList,
        ends: frozenset[int],
    ) -> None:
        self.passes = 0  # of the draft, for the last tree
        self._draft, self._growth, self._ends = draft, growth, ends
        self._processors: Any = processors
        self._pauses = Pauses(learned_positions(draft))
        self._width, self._branching = (1, 1) if config.policy == "chain" else (config.width, config.branching)
        self._cache: Any = DynamicCache(config=draft.config.get_text_config(decoder=True))
        self._branches: Branches | None = None
        self._computed: dict[int, int] = {}  # by index in the tree, the index in branches of tokens with K/V

    @torch.no_grad()
    def grow(self, ids: torch.Tensor, room: int, *, chain: bool = False) -> Tree:
        """Grow a tree, or a `chain`, behind `ids` [1, tokens], of at most `room` levels.

        Behind more tokens than the draft has positions it stays empty.
        """
        model = self._draft
        room = self._pauses.room(ids.shape[1], room)
        if room < 1:
            self.passes = 0
            return Tree()
        ids = ids.to(input_device(model))
        held = self._cache.get_seq_length()
        output = run_model(model, ids[:, held:], self._cache)
        if getattr(output, CACHE) is not self._cache or not held:  # a model with attach() brings its own
            self._cache = getattr(output, CACHE)
            self._cache.activate_past_recording()
        self._cache.crop(0)  # layers with a window let go of what has left it
        position = torch.tensor([[ids.shape[1]]], device=ids.device)
        self._branches, self._computed, self.passes = Branches(model, self._cache, position), {}, 1
        tree, logits, behind = Tree(), output.logits[0, -1:], [ROOT]
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
            logits = self._branches.forward([tree.tokens[node] for node in behind], parents)
            self._computed |= {node: first + place for place, node in enumerate(behind)}
            self.passes += 1

    def keep(self, path: Sequence[int]) -> None:
        """Keep the K/V of accepted tokens of the last tree, as far as it was computed."""
        assert self._branches is not None
        self._branches.keep([self._computed[node] for node in path if node in self._computed])

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
