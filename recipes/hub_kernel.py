"""The attention of `kvboost_hf/attention` as a kernel of the `kernels` library, to be used without kvboost_hf.

`python -m recipes.hub_kernel FOLDER` writes the card of `hub/attention/`, `build/torch-cpu/` and `build/torch-cuda/`:
the layout that `kernels` loads, from the hub or from a folder. Such a kernel has to hold all of its code, and imports
it by relative names. Its operators need a namespace of their own, so that two versions can be loaded. So it is made of
the package's files here, and not kept beside them.
"""

import json
import re
import shutil
import sys
from hashlib import blake2b
from pathlib import Path

ROOT = Path(__file__).parents[1]
CARD = ROOT / "hub" / "attention" / "README.md"
NAME = "kvboost-attention"
VERSION = 1  # what `kernels` calls a version: a new one may take other arguments
BACKENDS = ("cpu", "cuda")

_PACKAGE = ROOT / "kvboost_hf"
_WITH_TRANSFORMERS = {"__init__.py", "masks.py"}  # of attention/: transformers makes masks itself here
_BESIDE = ("forks.py", "handles.py", "kernels.py", "triton_launch.py", "visibility.py")

_INIT = '''"""The attention of kvboost_hf, as transformers calls it for `attn_implementation="ORG/{name}"`."""

from .attention.backends import active_tier, use_tier
from .attention.layer import attention as flash_attn_forward
from .kernels import kernel_calls

supports_flash_attn = True  # by which transformers knows that `flash_attn_forward` takes what its layers pass

__all__ = ["active_tier", "flash_attn_forward", "kernel_calls", "supports_flash_attn", "use_tier"]
'''


def sources() -> dict[str, str]:
    """The files of the package that are needed, by their path in it."""
    attention = _PACKAGE / "attention"
    paths = [path for path in sorted(attention.rglob("*")) if path.suffix in (".py", ".cu", ".cuh")]
    kept = [path for path in paths if path.parent != attention or path.name not in _WITH_TRANSFORMERS]
    kept += [_PACKAGE / name for name in _BESIDE]
    return {path.relative_to(_PACKAGE).as_posix(): path.read_text("utf-8") for path in kept}


def relocated(path: str, text: str, namespace: str) -> str:
    """A file of the package with relative imports, and operators in `namespace`."""
    if not path.endswith(".py"):
        return text
    up = "." * (path.count("/") + 1)
    text = re.sub(
        r"^( *)import kvboost_hf\.([\w.]+)\.(\w+) as (\w+)", rf"\1from {up}\2 import \3 as \4", text, flags=re.M
    )
    text = re.sub(r"^( *)from kvboost_hf\.([\w.]+) import", rf"\1from {up}\2 import", text, flags=re.M)
    text = re.sub(r"^( *)from kvboost_hf import", rf"\1from {up} import", text, flags=re.M)
    return text.replace('"kvboost_hf::', f'"{namespace}::').replace("torch.ops.kvboost_hf.", f"torch.ops.{namespace}.")


def write(folder: Path) -> None:
    """Write the kernel and its card into `folder`; what was built there before is replaced."""
    shutil.rmtree(folder / "build", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(CARD, folder / "README.md")
    files = sources()
    digest = blake2b(json.dumps(files, sort_keys=True).encode(), digest_size=5).hexdigest()
    for backend in BACKENDS:
        unique = f"{NAME.replace('-', '_')}_{backend}_{digest}"
        metadata = {
            "id": unique,
            "name": NAME,
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        made = {path: relocated(path, text, unique) for path, text in files.items()}
        made |= {"attention/__init__.py": "", "__init__.py": _INIT.format(name=NAME)}
        made["metadata.json"] = json.dumps(metadata, indent=2) + "\n"
        for path, text in made.items():
            target = folder / "build" / f"torch-{backend}" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
