"""Drafts that are copied, pickled and saved."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvboost_hf import load_assistant, speculation_stats
from tests.conftest import as_inputs, pickles_models, random_ids
from tests.streaming import make_layers

IDS = random_ids(30, 1)


def pair(**kwargs: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = make_layers(3)
    return target, load_assistant(make_layers(2), target=target, **kwargs)


def answer(target: PreTrainedModel, **kwargs: Any) -> torch.Tensor:
    found: torch.Tensor = target.generate(**as_inputs(IDS), max_new_tokens=12, eos_token_id=None, **kwargs)
    return found


def pickled(draft: PreTrainedModel) -> Any:
    return pickle.loads(pickle.dumps(draft))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pytest.param(pickled, marks=pickles_models)])
def test_a_copy_is_a_draft_of_its_own(duplicate: Any) -> None:
    target, draft = pair()
    wanted = answer(target)
    assert torch.equal(answer(target, assistant_model=draft), wanted)
    before = copy.copy(speculation_stats(draft))
    other = duplicate(draft)
    assert speculation_stats(other).rounds == 0
    passes = {"draft": 0, "other": 0}
    for name, model in (("draft", draft), ("other", other)):
        model.register_forward_hook(lambda *_, name=name: passes.update({name: passes[name] + 1}))
    assert torch.equal(answer(target, assistant_model=other), wanted)
    assert passes["other"] > 0 == passes["draft"]
    assert speculation_stats(other).rounds > 0
    assert speculation_stats(draft) == before
    with torch.no_grad():  # its weights are its own, too
        for parameter in other.parameters():
            parameter.zero_()
    said = [model.generate(IDS, max_new_tokens=3)[0, 30:].tolist() for model in (draft, other)]
    assert said[0] != said[1]


def test_a_saved_draft(tmp_path: Path) -> None:
    target, draft = pair()
    wanted = answer(target, assistant_model=draft)
    draft.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    again = load_assistant(found, target=target)
    assert torch.equal(answer(target, assistant_model=again), wanted)
    assert speculation_stats(again).rounds > 0
