"""TRL's trainers over an attached model: prompts are computed once for all samples, and training goes as without."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed

from kvboost_hf import ChunkStore, attach
from kvboost_hf.assets import EMBEDDED_MODEL_DIR

pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="`python -m tests.environments libraries` makes its place"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.slow,
]
HEAD = "You read documents and answer questions about them. Maria lives in Rome. The lamp is red. " * 4
SAMPLES, STEPS = 4, 5
PROBES = 28  # tokens that are computed once, to see what the model can do


class Prefilled:
    """Counts the tokens of prompts that reach a model while it generates."""

    leaves_kv_alone = True

    def __init__(self) -> None:
        self.tokens, self.generates = 0, False

    def __call__(self, _module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if self.generates and args[0].shape[1] > 1:
            self.tokens += args[0].numel()


def small_model(tokenizer: Any) -> LlamaForCausalLM:
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            initializer_range=0.2,
        )
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) / 10 for text in completions]


def train(kind: str, folder: Path, *, attached: bool, **settings: Any) -> tuple[list[Any], int, int]:
    """Train for some steps.

    Returns:
        Loss, norm of the gradients and reward of each step; tokens of prompts that went through the model; tokens of
        the distinct prompts of all steps.
    """
    import trl
    from datasets import Dataset

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL_DIR)
    model, count = small_model(tokenizer), Prefilled()
    model.get_input_embeddings().register_forward_pre_hook(count)
    if attached:
        attach(model, ChunkStore(model, chunk_size=32))
    prompts = [f"{HEAD}Where does {name} live?" for name in ("Maria", "Tom")]

    class Trainer(getattr(trl, f"{kind}Trainer")):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            count.generates = True
            try:
                return super()._generate_single_turn(*args, **kwargs)
            finally:
                count.generates = False

    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2 * SAMPLES, num_generations=SAMPLES,
        max_completion_length=8, learning_rate=1e-2, use_cpu=True, report_to=[], logging_steps=1, seed=0, beta=0.0,
        save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
    )
    trainer.train()
    log = [(each["loss"], each["grad_norm"], each["reward"]) for each in trainer.state.log_history if "loss" in each]
    return log, count.tokens, STEPS * sum(len(tokenizer(prompt).input_ids) for prompt in prompts)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_prompts_are_computed_once_and_losses_stay(kind: str, bf16: bool, tmp_path: Path) -> None:
    plain, all_tokens, distinct = train(kind, tmp_path, attached=False, bf16=bf16)
    ours, tokens, _ = train(kind, tmp_path, attached=True, bf16=bf16)
    assert len(plain) == STEPS
    assert all_tokens >= SAMPLES * distinct
    assert distinct / 2 <= tokens <= distinct + PROBES  # fewer, if K/V of earlier weights were used
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), atol=2e-2 if bf16 else 1e-4, rtol=1e-3)
