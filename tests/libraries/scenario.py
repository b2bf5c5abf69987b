"""A scenario: some calls as the users of a library make them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.libraries.watch import Watch

Answers = list[Any]  # texts, or token ids


@dataclass(frozen=True, slots=True)
class Session:
    """What a scenario is given.

    Args:
        model: Fresh, and not attached.
        tokenizer: The tokenizer of the model.
        attach: `kvboost_hf.attach`, or in the run that it is compared with, a function that does nothing.
        watch: To be told when the model gets other weights.
        notes: What a scenario says of a run besides its answers.
    """

    model: PreTrainedModel
    tokenizer: Any
    attach: Callable[[Any], Any]
    watch: Watch
    notes: list[str] = field(default_factory=list)

    def chat(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """What `generate()` is given for a chat."""
        inputs = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        return dict(inputs)

    def text(self, text: str) -> dict[str, Any]:
        """What `generate()` is given for a text."""
        return dict(self.tokenizer(text, return_tensors="pt"))

    def new_text(self, output: Any, inputs: dict[str, Any]) -> str:
        """What `generate()` has added."""
        return str(self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class Scenario:
    """Calls of one library, by one of its paths.

    Args:
        package: The library, whose version counts.
        path: The way through it.
        module: What must be importable.
        calls: Make them.
        counts: Where tokens are counted: `"embedding"`, or `"forward"` where what embeds them is compiled.
        known: What is not reused, and why, if that is known and as it should be.
        probe: Tokens that kvboost_hf runs for itself, once for a model, to see whether its prompts may be cut.
    """

    package: str
    path: str
    module: str
    calls: Callable[[Session], Answers]
    counts: str
    known: str
    probe: int

    @property
    def file(self) -> str:
        """Where it is."""
        return self.calls.__module__.rpartition(".")[2]

    @property
    def name(self) -> str:
        """What it is called by."""
        return f"{self.package}: {self.path}"

    @property
    def version(self) -> str | None:
        """That of the library, or None where it is not installed."""
        try:
            return version(self.package) if find_spec(self.module) else None
        except (PackageNotFoundError, ModuleNotFoundError):
            return None


_SCENARIOS: dict[str, Scenario] = {}


def scenario(
    package: str,
    path: str,
    *,
    module: str = "",
    counts: str = "embedding",
    known: str = "",
    probe: int = 20,
) -> Callable[[Callable[[Session], Answers]], Callable[[Session], Answers]]:
    """Make a function one of the scenarios."""

    def add(calls: Callable[[Session], Answers]) -> Callable[[Session], Answers]:
        made = Scenario(package, path, module or package.replace("-", "_"), calls, counts, known, probe)
        assert made.name not in _SCENARIOS
        _SCENARIOS[made.name] = made
        return calls

    return add


def scenarios() -> dict[str, Scenario]:
    """All of them by name, those of one file after those of another."""
    for file in files():
        import_module(f"{__package__}.{file}")
    return dict(_SCENARIOS)


def files() -> Iterator[str]:
    """The files that scenarios are in."""
    yield from sorted(path.stem for path in Path(__file__).parent.glob("with_*.py"))
