"""Forwards that the package runs for itself: one function has them all, and no setting of a model is in their way."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import kvboost_hf
from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, load_assistant, score_ids
from tests import multimodal
from tests.conftest import as_inputs, counted, make_model, random_ids
from tests.internals.assisted import branch_reason
from tests.internals.cache import Measure, blend_reason
from tests.internals.compat import PrivateCache, cache_layers, run_model

PACKAGE = Path(kvboost_hf.__file__).parent
OWN = "compat/private.py"
PROBE = 20  # tokens that are computed once for each model, to see whether its prompts may be cut


def test_one_function_runs_the_model() -> None:
    """Nothing else names the arguments that a forward of our own has."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and {"use_cache", "logits_to_keep"} & {each.arg for each in node.keywords}:
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found <= {OWN}
    assert "def run_model(" in (PACKAGE / OWN).read_text("utf-8")


def _mixtral(**settings: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = MixtralConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            **settings,
        )
        return MixtralForCausalLM(config).eval()


def test_router_logits_of_a_configuration() -> None:
    """A model makes a loss of them by the mask, which has another form in forwards of ours."""
    model = _mixtral(output_router_logits=True)
    assert [blend_reason(model, measure) for measure in Measure] == [None] * len(Measure)
    assert branch_reason(model) is None


def test_moved_chunks_of_a_model_with_router_logits() -> None:
    model, document = _mixtral(output_router_logits=True), random_ids(64, 1)
    store = ChunkStore(model, chunk_size=16)
    store.warm(documents=[document[0].tolist()])
    ids = torch.cat([random_ids(20, 2), document, random_ids(10, 3)], 1)
    policy = ReusePolicy(mode="blend", repair="query", min_prefill_saving=0, progressive=True)
    cache = ChunkReuseCache(model, store, policy)
    model.generate(**as_inputs(ids), past_key_values=cache, max_new_tokens=4)
    assert cache.report.tier_tokens["ram"] > 0
    assert cache.repair() >= 0
    found = model.generate(**as_inputs(ids), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert found.tolist() == model.generate(**as_inputs(ids), max_new_tokens=4, do_sample=False).tolist()


@pytest.mark.daily
@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_of_a_configuration_do_not_keep_scores_from_reuse(name: str) -> None:
    model = make_model()
    model.set_attn_implementation("eager")
    expected = score_ids(model, [(random_ids(60, 1)[0].tolist(), [5, 6])], cache=ChunkReuseCache(model))
    setattr(model.config, name, True)
    cache = ChunkReuseCache(model)
    for _ in range(2):
        with counted(model) as work:
            found = score_ids(model, [(random_ids(60, 1)[0].tolist(), [5, 6])], cache=cache)
    assert cache.report.bypass_reason is None
    assert work.tokens == 2 + PROBE
    assert found[0].token_logprobs == pytest.approx(expected[0].token_logprobs)


def test_nothing_of_each_token_is_returned() -> None:
    model = _mixtral(output_router_logits=True, output_hidden_states=True, attn_implementation="eager")
    model.config.output_attentions = True
    found = run_model(model, random_ids(5), PrivateCache(cache_layers(model)))
    assert found.logits.shape[1] == 1
    assert not found.logits.requires_grad
    assert (found.hidden_states, found.attentions, found.router_logits) == (None, None, None)


def test_a_draft_that_returns_tuples() -> None:
    target, draft = make_model("deep_llama"), make_model()
    draft.config.return_dict = False
    ids = random_ids(30, 1)
    assistant = load_assistant(draft, target=target)
    found = target.generate(**as_inputs(ids), assistant_model=assistant, max_new_tokens=12, do_sample=False)
    assert found.tolist() == target.generate(**as_inputs(ids), max_new_tokens=12, do_sample=False).tolist()


def test_a_check_of_a_store_leaves_the_positions_of_a_model_alone() -> None:
    """Such a model keeps how far an image has shifted its text, and goes on from there."""
    model = multimodal.make_model("qwen2_vl")
    store = ChunkStore(model, chunk_size=16)
    with torch.no_grad():
        model(input_ids=random_ids(40, 1) % 90 + 2, past_key_values=ChunkReuseCache(model, store), logits_to_keep=1)
    model.model.rope_deltas = shift = torch.tensor([[-7]])
    found = store.check_integrity()
    assert (found.wrong, found.checked) == (0, found.checked)
    assert found.checked > 0
    assert model.model.rope_deltas is shift


def test_text_behind_an_image_that_was_shown_before() -> None:
    """Without positions, such a model would count on from its last prompt."""
    model = multimodal.make_model("qwen2_vl")
    ids = random_ids(12, 1) % 90 + 2
    expected = run_model(model, ids, PrivateCache(cache_layers(model))).logits
    model.model.rope_deltas = torch.tensor([[9]])
    cache = PrivateCache(cache_layers(model))
    run_model(model, ids[:, :7], cache)
    assert torch.allclose(run_model(model, ids[:, 7:], cache).logits, expected, atol=1e-5)
