"""The kinds of heads that `load_assistant` takes, and what they are given: for `tests/parity/test_heads.py`, the
contract that each kind must fulfil, and for the tests of what only one has.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from kvboost_hf import DraftTreeConfig, TreeDecoding, check_model_compatibility, load_assistant, speculation_stats
from tests import eagle, gemma4, mtp
from tests.conftest import CHOOSES, make_model, random_ids
from tests.internals.compat import decoder_layers
from tests.speculation import Passes

PROMPT = random_ids(150, seed=3)
NEW = 24
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
TREES = DraftTreeConfig(policy="tree", depth=4, width=3, branching=3, max_nodes=20)
CHAINS: dict[str, Any] = {"schedule": "constant", "num_assistant_tokens": 4}
# How many tokens behind a column its K/V depends on; None of those that read the K/V of their target alone.
KINDS: dict[str, int | None] = {
    "eagle": 1,
    "eagle qwen3": 1,
    "eagle gemma2": 1,
    "glm4_moe": 1,
    "glm4_moe 2": 2,
    "deepseek_v3": 1,
    "mimo_v2_flash": 1,
    "blocks": 0,
    "blocks gemma2": 0,
    "gemma4 text": None,
    "gemma4 shares": None,
    "gemma4 unified": None,
}
if not CHOOSES:  # other heads need releases of transformers that show hidden states of single layers
    KINDS = {kind: behind for kind, behind in KINDS.items() if kind.startswith("eagle")}


class Pair(NamedTuple):
    """A model, and heads that draft for it."""

    model: Any
    heads: Any

    def by(self, how: str) -> dict[str, Any]:
        """The argument of generate() by which these heads draft "chains" or "trees"."""
        if how == "trees":
            return {"custom_generate": TreeDecoding(self.heads, TREES)}
        return {"assistant_model": self.heads}


def make_pair(kind: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Pair:
    """A model, and heads for it, of other weights for another `seed`."""
    if kind not in KINDS:
        pytest.skip("this release of transformers has no such heads")
    family, _, rest = kind.partition(" ")
    if family == "eagle":
        model: Any = eagle.make_target(rest or "llama").to(dtype)
        weights = eagle.weights_of(model)
        if seed:
            weights["fc.weight"] = weights["fc.weight"] * 3
        folder = eagle.save_heads(
            folder / f"heads of {seed}",
            {name: each.to(dtype) if each.is_floating_point() else each for name, each in weights.items()},
        )
        heads: Any = load_assistant(str(folder), target=model, **CHAINS)
    elif family in ("blocks", "gemma4"):
        model = make_model(rest or "deep_llama") if family == "blocks" else gemma4.make_target(rest)
        torch.nn.Module.to(model, dtype)
        made = make_blocks(model, [0, 1]) if family == "blocks" else gemma4.make_assistant(model, rest)
        for each in made.to(dtype).parameters():
            each.data *= 1 + seed
        heads = load_assistant(made, target=model, **(CHAINS if family == "gemma4" else {}))
    else:
        model = mtp.make_target(family, int(rest or 1))
        torch.nn.Module.to(model, dtype)
        with pytest.MonkeyPatch.context() as patched:
            layers: Any = mtp.use_layers(model, patched)
            for layer in layers.layers:
                layer.to(dtype)
                layer.eh_proj.weight.data *= 1 + seed
            heads = load_assistant(model)
    check_model_compatibility(model)
    return Pair(model, heads)


def make_blocks(model: Any, layers: list[int]) -> Any:
    """A tiny drafter of blocks for a model."""
    config = model.config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MuseGlimmerAssistantModel(
            MuseGlimmerAssistantConfig(
                hidden_size=config.hidden_size,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                block_size=4,
                mask_token_id=5,
                target_layer_ids=layers,
                bos_token_id=1,
                eos_token_id=None,
                pad_token_id=0,
                sliding_window=64,
            )
        ).eval()


class Rounds:
    """What heads are given in one call, forward by forward; in any forward they may fail."""

    leaves_kv_alone = True  # read by the fingerprint: other hooks may change what heads compute

    def __init__(self) -> None:
        self.given: list[dict[str, torch.Tensor]] = []
        self.drafts: list[list[int]] = []  # tokens, of heads whose forward chooses them
        self.shown: list[torch.Tensor] = []  # numbers that each forward has returned of its last column
        self.act: Callable[[int], None] = lambda forwards: None

    def note(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook."""
        self.act(len(self.given))
        shared = {
            f"{name} {n}": each
            for name, pair in kwargs.get("shared_kv_states", {}).items()
            for n, each in enumerate(pair)
        }
        given = {"input_ids": args[0]} if args else {}
        given |= {name: each for name, each in {**kwargs, **shared}.items() if isinstance(each, torch.Tensor)}
        rest = ("full_input_ids", "seen")  # padding to the left, and masks where a forward needs one
        self.given.append({name: each.detach().clone() for name, each in given.items() if name not in rest})

    def note_output(self, _: Any, args: tuple[Any, ...], output: Any) -> None:
        """The hook behind a forward."""
        parts = output if isinstance(output, tuple) else (output, *getattr(output, "values", tuple)())
        numbers = [each for each in parts if isinstance(each, torch.Tensor) and each.is_floating_point()]
        self.shown.append(torch.cat([each[:, -1].flatten() for each in numbers]).detach())
        if isinstance(output, tuple) and not output[0].is_floating_point():
            self.drafts.append(output[0][0].tolist())

    def accepted(self, text: list[int]) -> int:
        """How many drafted tokens are in the answer: those of a round follow the token that the target gave."""
        count = at = 0
        for draft in self.drafts:
            agree = 0
            while agree < len(draft) and text[at + 1 + agree : at + 2 + agree] == draft[agree : agree + 1]:
                agree += 1
            count, at = count + agree, at + 1 + agree
        return count

    @property
    def columns(self) -> list[int]:
        """Columns of hidden states that heads were given in each forward."""
        names = ("context_hidden_states", "last_hidden_states", "hidden", "inputs_embeds")
        return [next(given[name] for name in names if name in given).shape[1] for given in self.given]

    def assert_like(self, cold: "Rounds", atol: float = 1e-4) -> None:
        """The same as in a call without a cache; of the first forward, the last columns."""
        assert len(self.given) == len(cold.given)
        assert self.drafts == cold.drafts
        for ours, theirs in zip(self.given, cold.given, strict=True):
            assert ours.keys() == theirs.keys()
            for name, each in ours.items():
                last = tuple(
                    slice(total - size, total) for size, total in zip(each.shape, theirs[name].shape, strict=True)
                )
                torch.testing.assert_close(
                    each, theirs[name][last], atol=atol, rtol=atol, msg=lambda text, name=name: f"{name}: {text}"
                )


@contextmanager
def watched(heads: Any) -> Iterator[Rounds]:
    """Record what heads are given within a `with` block."""
    rounds = Rounds()
    before = heads.register_forward_pre_hook(rounds.note, with_kwargs=True)
    behind = heads.register_forward_hook(rounds.note_output)
    try:
        yield rounds
    finally:
        before.remove()
        behind.remove()


class Drafted(NamedTuple):
    """What came of one call."""

    answer: torch.Tensor
    counts: tuple[int, int]  # tokens that heads have drafted, and those of them that are in the answer
    rounds: Rounds
    forwarded: int  # tokens that went through the target's first layer: behind layers that share K/V only one does


def drafted(pair: Pair, prompt: torch.Tensor = PROMPT, how: str = "chains", **given: Any) -> Drafted:
    """Answer a prompt with drafts."""
    by = pair.by(how)
    stats = speculation_stats(by.get("custom_generate", pair.heads))
    before, passes = (stats.drafted, stats.accepted), Passes()
    handle = decoder_layers(pair.model)[0].register_forward_pre_hook(passes.note)
    try:
        with watched(pair.heads) as rounds:
            answer = pair.model.generate(prompt, **{**by, **GREEDY, **given})
    finally:
        handle.remove()
    return Drafted(answer, (stats.drafted - before[0], stats.accepted - before[1]), rounds, passes.tokens)
