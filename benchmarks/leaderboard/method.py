"""What a method of the leaderboard says of itself, and how its file is found."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from kvboost_hf import ChunkStore, ReusePolicy
from kvboost_hf.cache.planning.moved import REPAIRS, Repair

FOLDER = Path(__file__).parent / "methods"
Change = Callable[[ChunkStore], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to serve prompts about documents whose K/V was computed in other prompts.

    Args:
        source: Where it is from: a paper with its year and address, or "ours".
        about: What it does, in a sentence.
        settings: The policy of each setting, by what stands behind the method's name; None runs without a cache.
        repair: Takes the place of the repair that the policies name, which is not `"auto"`.
        change: A context in which its prompts run, of the store that they read.
        control: For a control: how many times the KL of every method its own has to be. None for a method.
    """

    source: str
    about: str
    settings: Mapping[str, ReusePolicy | None]
    repair: Repair | None = None
    change: Change = nullcontext
    control: float | None = None

    @contextmanager
    def running(self, policy: ReusePolicy, store: ChunkStore) -> Iterator[None]:
        """Within it, a cache with one of its policies does as the method says."""
        with ExitStack() as stack:
            if self.repair is not None:
                stack.callback(REPAIRS.__setitem__, policy.repair, REPAIRS[policy.repair])
                REPAIRS[policy.repair] = self.repair
            stack.enter_context(self.change(store))
            yield


def once(repair: Any = "query", ratio: float | None = None, **settings: Any) -> ReusePolicy:
    """A policy whose repair ends with the first token."""
    return ReusePolicy(mode="blend", repair=repair, recompute_ratio=ratio, progressive=False, **settings)


def shares(repair: str = "query", *ratios: float) -> dict[str, ReusePolicy]:
    """Settings that compute 15% and 30% of the moved tokens again, or other shares."""
    return {f"{ratio:.0%}": once(repair, ratio) for ratio in ratios or (0.15, 0.3)}


def load_methods(names: Iterable[str] = ()) -> dict[str, Method]:
    """Methods by the names of their files.

    Args:
        names: The names of files in `methods/`, or paths that end in .py; none of them are all in `methods/`.

    Raises:
        ValueError: there is no such file, it has no `METHOD`, or its name is taken.
    """
    known = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
    found: dict[str, Method] = {}
    for name in names or known:
        path = Path(name) if name.endswith(".py") else known.get(name)
        if path is None or not path.is_file():
            raise ValueError(f"A method must be one of {', '.join(known)}, or a file that ends in .py, got {name!r}.")
        if path.stem in found or path.resolve() != known.get(path.stem, path).resolve():
            raise ValueError(f"{path}: there is a method {path.stem!r} already. Give the file another name.")
        found[path.stem] = _load(path)
    return found


def _load(path: Path) -> Method:
    spec = spec_from_file_location(f"leaderboard_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    method = getattr(module, "METHOD", None)
    if not isinstance(method, Method):
        raise ValueError(f"{path} must assign a `Method` to `METHOD`, got {method!r}.")
    return method
