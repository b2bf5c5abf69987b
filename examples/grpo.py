"""GRPO with TRL, where the samples of a prompt share what is computed of it: one line more."""

from tempfile import TemporaryDirectory

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from kvboost_hf import attach, last_cache
from kvboost_hf.assets import EMBEDDED_MODEL_DIR

MODEL = EMBEDDED_MODEL_DIR  # in its place: "Qwen/Qwen2.5-0.5B-Instruct"
DOCUMENT = "Maria lives in Rome. She likes soup. She plays the piano. She has two cats. The lamp is red. " * 3
SAMPLES = 8

model = attach(AutoModelForCausalLM.from_pretrained(MODEL))


def is_short(completions: list[str], **_: object) -> list[float]:
    """Reward short answers, and print what became of the prompt."""
    print(last_cache(model).report)
    return [-float(len(text)) for text in completions]


with TemporaryDirectory() as folder:
    arguments = GRPOConfig(
        output_dir=folder,
        max_steps=2,
        num_generations=SAMPLES,
        per_device_train_batch_size=SAMPLES,
        max_completion_length=8,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    GRPOTrainer(
        model=model,
        reward_funcs=is_short,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": f"{DOCUMENT}\n\nWhere does Maria live?"}] * SAMPLES),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    ).train()
