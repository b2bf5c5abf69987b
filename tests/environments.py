"""`python -m tests.environments NAME`: an environment for tests with packages that .venv cannot hold, above .venv."""

import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

_KEPT = ("torch", "transformers", "tokenizers", "huggingface_hub", "numpy", "peft", "accelerate")


@dataclass(frozen=True)
class Environment:
    """Packages that are installed in `.venv-NAME` beside those of the environment that makes it."""

    packages: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()


ENVIRONMENTS = {
    # The extras `clients-openai2`, which needs openai<3, and `ray`: clients of the server, and servers that hold ours;
    # and the schemas of Kubernetes.
    "clients": Environment(
        (
            "instructor==1.17.0",
            "kubernetes-validate==1.37.0",
            "llama-index-llms-openai-like==0.8.1",
            "openai==2.54.0",
            "ray[serve]==2.60.0",
        )
    ),
    # Libraries that call generate().
    "libraries": Environment(
        (
            "guidance==0.3.1",
            "kvpress==0.5.2",  # for what the newer one needs: that is put above it below
            "llama-index-llms-huggingface==0.8.0",
            "lm_eval==0.4.13",  # of which we are a model
            "optimum-quanto==0.2.7",
            "outlines==1.3.3",
            "smolagents==1.26.0",
            "trl==1.16.0",
        ),
        # Their metadata refuses this release of transformers or huggingface_hub; they work with it, or nearly so.
        without_dependencies=("kvpress==0.5.5", "langchain-huggingface==1.2.3"),
    ),
    # Tools that write checkpoints in 4 bits: GPTQModel asks for another torch, llm-compressor for other transformers.
    "formats": Environment(
        (
            "compressed-tensors==0.19.0",
            "datasets==5.2.0",
            "device-smi==0.5.7",
            "logbar==0.4.15",
            "nvidia-ml-py",
            "optimum-quanto==0.2.7",
            "py-cpuinfo",
            "pypcre==0.6.4",
            "threadpoolctl",
        ),
        without_dependencies=(
            "auto-round==0.15.1",
            "defuser==0.0.28",
            "gptqmodel==7.7.0",
            "llmcompressor==0.14.0.1",
            "tokenicer==0.0.14",
            "torchao==0.18.0",
        ),
    ),
}


def main() -> int:
    """Make the environment that is named, or bring it up to date; prints its interpreter."""
    [name] = sys.argv[1:]
    print(make(Path(__file__).parents[1] / f".venv-{name}", ENVIRONMENTS[name]))  # noqa: T201
    return 0


def make(folder: Path, environment: Environment) -> Path:
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
        _install(python, "--constraint", str(kept), *environment.packages)
    if environment.without_dependencies:
        _install(python, "--no-deps", *environment.without_dependencies)
    return python


def _install(python: Path, *what: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    subprocess.run(command, check=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
