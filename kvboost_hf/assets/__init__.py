"""The embedded reader: a language model of under a million parameters that answers questions about documents.

`recipes/train.py` of the repository trains it on the synthetic text of `kvboost_hf.assets.world`, so that demos and
quality tests run on a CPU without a download. It knows nothing but that world.

Example:
    >>> model, tokenizer = load_embedded()
    >>> messages = [
    ...     {"role": "system", "content": "You read documents and answer questions about them."},
    ...     {"role": "user", "content": "Anna lives in Oslo. She plays the piano.\\n\\nWhat does Anna play?"},
    ... ]
    >>> inputs = tokenizer.apply_chat_template(
    ...     messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ... )
    >>> output = model.generate(**inputs)
    >>> tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    'Anna plays the piano.'
"""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["EMBEDDED_DRAFT_DIR", "EMBEDDED_MODEL_DIR", "load_embedded", "load_embedded_draft"]

EMBEDDED_MODEL_DIR: Path = Path(__file__).parent / "reader"
EMBEDDED_DRAFT_DIR: Path = Path(__file__).parent / "draft"


def load_embedded(
    dtype: torch.dtype | None = None, attn_implementation: str | None = None
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load the embedded reader and its tokenizer from the package's own files.

    Args:
        dtype: Type of the weights; float32 if None.
        attn_implementation: Attention of transformers, such as ``"eager"`` or ``"sdpa"``; its default if None.

    Returns:
        The model on the CPU, in eval mode, and its tokenizer.
    """
    model = _load(EMBEDDED_MODEL_DIR, dtype, attn_implementation)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EMBEDDED_MODEL_DIR, local_files_only=True)
    return model, tokenizer


def load_embedded_draft(dtype: torch.dtype | None = None, attn_implementation: str | None = None) -> LlamaForCausalLM:
    """Load the draft of the embedded reader, a model of one layer with the reader's tokenizer.

    `recipes/train_draft.py` of the repository trains it, for ``reader.generate(assistant_model=draft)``.

    Args:
        dtype: Type of the weights; float32 if None.
        attn_implementation: Attention of transformers, such as ``"eager"`` or ``"sdpa"``; its default if None.

    Returns:
        The model on the CPU, in eval mode.
    """
    return _load(EMBEDDED_DRAFT_DIR, dtype, attn_implementation)


def _load(folder: Path, dtype: torch.dtype | None, attn_implementation: str | None) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32 if dtype is None else dtype,
        attn_implementation=attn_implementation,
        local_files_only=True,
    )
    model.train(False)
    return model
