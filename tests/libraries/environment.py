"""`python -m tests.libraries.environment`: an environment with the libraries, above the one that this runs in."""

import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parents[2] / ".venv-libraries"
LIBRARIES = (
    "gguf==0.19.0",  # reads the model
    "guidance==0.3.1",
    "kvpress==0.5.2",  # for what the newer one needs: that is put above it below
    "llama-index-llms-huggingface==0.8.0",
    "optimum-quanto==0.2.7",
    "outlines==1.3.3",
    "smolagents==1.26.0",
)
# They refuse this release of transformers or huggingface_hub by their metadata, and work with it, or nearly so.
LIBRARIES_ALONE = ("kvpress==0.5.5", "langchain-huggingface==1.2.3")
_KEPT = ("torch", "transformers", "tokenizers", "huggingface_hub", "numpy", "peft", "accelerate")


def main() -> int:
    """Make it, or bring it up to date; prints its interpreter."""
    python = make(FOLDER)
    print(python)  # noqa: T201
    return 0


def make(folder: Path) -> Path:
    """Make the environment. What is here already, torch and transformers above all, is not installed again.

    Raises:
        subprocess.CalledProcessError: pip has failed.
    """
    venv.create(folder, with_pip=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    python = Path(venv.EnvBuilder().ensure_directories(folder).env_exe)
    inside = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = (f"import site; site.addsitedir({path!r})\n" for path in here)
    Path(inside, "here.pth").write_text("".join(lines), encoding="utf-8")
    with TemporaryDirectory() as scratch:
        kept = Path(scratch, "kept.txt")
        kept.write_text("".join(f"{name}=={version(name)}\n" for name in _KEPT), encoding="utf-8")
        _install(python, "--constraint", str(kept), *LIBRARIES)
    _install(python, "--no-deps", *LIBRARIES_ALONE)
    return python


def _install(python: Path, *what: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    subprocess.run(command, check=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
