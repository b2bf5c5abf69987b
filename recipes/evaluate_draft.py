"""Measures how much of what a draft proposes its target keeps, in assisted ``generate()``.

Run it as ``python -m recipes.evaluate_draft`` for the tables of the embedded draft's model card.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost_hf.assets import load_embedded, load_embedded_draft
from kvboost_hf.assets.world import ChatTurn, chat_messages, make_chat, make_documents
from kvboost_hf.compat import CACHE
from recipes.evaluate import encode_chat


@dataclass(frozen=True, slots=True)
class Round:
    """One pass of the target over tokens that the draft proposed."""

    drafted: int
    accepted: int  # drafted tokens that are in the answer
    committed: int  # tokens of the answer, one more than accepted unless the answer ended with a drafted token


@dataclass(frozen=True, slots=True)
class Rounds:
    """Sums over the rounds of any number of answers, of which there was at least one."""

    rounds: tuple[Round, ...]

    @property
    def drafted(self) -> int:
        return sum(each.drafted for each in self.rounds)

    @property
    def committed(self) -> int:
        return sum(each.committed for each in self.rounds)

    @property
    def acceptance(self) -> float:
        """Accepted tokens per drafted token; NaN if nothing was drafted."""
        return sum(each.accepted for each in self.rounds) / self.drafted if self.drafted else float("nan")

    @property
    def committed_per_round(self) -> float:
        return self.committed / len(self.rounds)


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, *, seed: int, num_documents: int = 3, num_words: int = 64
) -> list[torch.Tensor]:
    """Draws prompts that neither model was trained on: single questions, and every other one a turn of a chat.

    Args:
        tokenizer: The embedded tokenizer.
        count: Number of prompts.
        seed: Below 10 000, see :func:`recipes.evaluate.accuracy`.
        num_documents: Documents of each prompt.
        num_words: Length of a document.

    Returns:
        Token ids of shape ``[1, num_tokens]`` each.
    """
    prompts: list[torch.Tensor] = []
    for index in range(count):
        rng = random.Random(f"{seed}/{index}")
        if index % 2:
            turns = make_chat(rng, num_documents, num_words=num_words)
        else:
            documents = tuple(make_documents(rng, num_documents, num_words=num_words))
            turns = [ChatTurn(documents, rng.choice(rng.choice(documents).facts))]
        prompts.append(encode_chat(tokenizer, chat_messages(turns)))
    return prompts


def use_constant_drafts(draft: PreTrainedModel, num_assistant_tokens: int) -> None:
    """Makes a draft propose so many tokens in each round, whatever came of the rounds before."""
    config = cast(Any, draft.generation_config)
    config.num_assistant_tokens = num_assistant_tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0


def assisted_answer(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: torch.Tensor, **options: Any
) -> tuple[list[int], list[Round]]:
    """Answers a prompt greedily with a draft.

    Args:
        target: The model that answers.
        draft: One with the same vocabulary.
        prompt: Token ids of shape ``[1, num_tokens]``.
        **options: More arguments of the target's ``generate()``.

    Returns:
        The answer's tokens and its rounds.
    """
    proposals: list[tuple[int, list[int]]] = []  # where the drafted tokens start, and what they are

    def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen, ids = kwargs[CACHE].get_seq_length(), kwargs["input_ids"][0].tolist()
        start = max(seen + 1, prompt.shape[1])
        proposals.append((start, ids[start - seen :]))

    handle = target.register_forward_pre_hook(note, with_kwargs=True)
    try:
        output = cast(Any, target).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=draft,
            do_sample=False,
            **options,
        )
    finally:
        handle.remove()
    ids = output[0].tolist()
    ends = [start for start, _ in proposals[1:]] + [len(ids)]
    rounds = []
    for (start, drafted), end in zip(proposals, ends, strict=True):
        # Only the last token of a round may differ from the drafted one in its place.
        accepted = sum(token == kept for token, kept in zip(drafted, ids[start:end], strict=False))
        rounds.append(Round(len(drafted), accepted, end - start))
    return ids[prompt.shape[1] :], rounds


def assisted_rounds(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: Sequence[torch.Tensor], num_assistant_tokens: int
) -> Rounds:
    """Answers all prompts with drafts of one length, see :func:`assisted_answer`."""
    use_constant_drafts(draft, num_assistant_tokens)
    return Rounds(tuple(one for prompt in prompts for one in assisted_answer(target, draft, prompt)[1]))


def ms_per_token(model: PreTrainedModel, prompt: torch.Tensor, count: int = 100) -> float:
    """Median time of a forward over one token behind a prompt, in ms."""
    with torch.inference_mode():
        cache = getattr(model(prompt, use_cache=True), CACHE)
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            model(prompt[:, -1:], **{CACHE: cache}, use_cache=True)
            times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes what the draft costs and how much of it is kept to the standard output, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of PyTorch")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    (reader, tokenizer), draft = load_embedded(), load_embedded_draft()
    prompts = held_out_prompts(tokenizer, options.prompts, seed=options.seed)
    sys.stdout.write("| | parameters | ms per token |\n|---|---|---|\n")
    for name, model in {"reader": reader, "draft": draft}.items():
        sys.stdout.write(f"| {name} | {model.num_parameters()} | {ms_per_token(model, prompts[0]):.2f} |\n")
    sys.stdout.write("\n| draft length | accepted per drafted | committed per round |\n|---|---|---|\n")
    for num_assistant_tokens in (2, 5, 10):
        found = assisted_rounds(reader, draft, prompts, num_assistant_tokens)
        sys.stdout.write(f"| {num_assistant_tokens} | {found.acceptance:.1%} | {found.committed_per_round:.2f} |\n")


if __name__ == "__main__":
    main()
