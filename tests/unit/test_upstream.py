"""The inside of other libraries is as the package takes it to be: `tests/upstream.py` lists what that is."""

import ast
import inspect
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import GenerationMixin, LlamaForCausalLM, cache_utils

import kvboost_hf
from tests import upstream
from tests.conftest import random_ids
from tests.internals.cache import _SAID_OF_CLASSES, NOTES
from tests.internals.compat import CACHE, SERVED_LAYERS, generate_frame

pytestmark = pytest.mark.daily

PACKAGE = Path(kvboost_hf.__file__).parent
RELEASE = Version(transformers.__version__)
_LOOK_UPS = ("attrgetter", "get", "pop")
LISTED = {name: each for each in upstream.PRIVATE for name in each.names}


@cache
def parsed() -> dict[str, list[ast.AST]]:
    """By file of the package, all nodes of its syntax tree."""
    return {
        path.relative_to(PACKAGE.parent).as_posix(): list(ast.walk(ast.parse(path.read_text("utf-8"))))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name.startswith("_") and not name.startswith("__")


def is_own(node: ast.expr) -> bool:
    """Whether an object is the one that the code belongs to."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def given_by_us() -> set[str]:
    """Attributes that classes and modules of the package define."""
    found = set()
    for node in chain.from_iterable(parsed().values()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def looked_up(node: ast.AST) -> Iterator[object]:
    """Names that code looks up in another object, as attributes or as strings."""
    if isinstance(node, ast.Attribute) and not is_own(node.value):
        yield node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        yield getattr(node.args[1], "value", None)
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) in _LOOK_UPS:
        yield from (getattr(each, "value", None) for each in node.args)
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        yield from (getattr(each, "value", None) for each in node.elts)
    elif isinstance(node, ast.Subscript):
        yield getattr(node.slice, "value", None)
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        yield getattr(node.left, "value", None)
    elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("kvboost_hf"):
        yield from (alias.name for alias in node.names)
        yield from (node.module or "").split(".")


@cache
def used() -> dict[str, list[str]]:
    """By private name of somebody else, the files of the package that use it."""
    ours, found = given_by_us(), defaultdict(set)
    for path, nodes in parsed().items():
        for name in filter(is_private, chain.from_iterable(map(looked_up, nodes))):
            if name in LISTED or name not in ours:
                found[str(name)].add(path)
    for name in filter(is_private, NOTES | _SAID_OF_CLASSES):
        found[name].add("kvboost_hf/cache/identity/walk.py")
    return {name: sorted(paths) for name, paths in found.items()}


def test_every_private_name_in_use_is_listed() -> None:
    unlisted = {name: paths for name, paths in used().items() if name not in LISTED.keys() | upstream.NO_NAMES}
    assert not unlisted, (
        f"{unlisted} are of other libraries, and may change with any release. Use what they promise if you can; else "
        "list the names in tests/upstream.py."
    )


def test_every_name_that_is_listed_is_used() -> None:
    assert LISTED.keys() - used().keys() == {"_apply"}  # which offload/awq/linear.py overrides


@pytest.mark.parametrize("name", sorted(LISTED))
def test_the_name_exists(name: str) -> None:
    listed = LISTED[name]
    if Version(listed.since) > RELEASE:
        pytest.skip(f"only since transformers {listed.since}")
    library = listed.owner.split(".", 1)[0]
    assert has(listed, name), (
        f"{listed.owner} of the installed {library} has no {name!r} any more, which {used().get(name)} take for: "
        f"{listed.means}. Find what took its place in the source of that release, read that, and list it in "
        "tests/upstream.py. If nothing has, K/V may depend on something unseen: let the cache bypass, with a reason."
    )


def has(listed: upstream.Names, name: str) -> bool:
    if listed.in_source:
        return re.search(rf"\b{name}\b", source_of(listed.owner)) is not None
    owner = pkgutil.resolve_name(listed.owner.removesuffix("()"))
    return hasattr(owner() if listed.owner.endswith("()") else owner, name)


def source_of(module: str) -> str:
    """The text of a module that is not imported."""
    library, *parts = module.split(".")
    spec = find_spec(library)
    assert spec is not None, f"{library} is not installed"
    assert spec.origin is not None
    if not parts:
        return Path(spec.origin).read_text("utf-8")
    path = Path(spec.origin).parent.joinpath(*parts)
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")


def test_every_local_variable_that_is_read_is_listed() -> None:
    listed = {name for names in upstream.LOCALS.values() for name in names}
    read = set()
    for node in parsed()["kvboost_hf/compat/calls.py"]:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            of, key = node.func.value, node.args[0]
        elif isinstance(node, ast.Subscript):
            of, key = node.value, node.slice
        else:
            continue
        if getattr(of, "attr", getattr(of, "id", None)) in ("f_locals", "variables"):
            read.add(getattr(key, "value", None))
    assert read == listed, "list in tests/upstream.py what is read of generate() and of the functions that it calls"


@pytest.mark.parametrize("function", upstream.LOCALS)
def test_the_local_variables_exist(function: str) -> None:
    names = upstream.LOCALS[function]
    there = inspect.unwrap(getattr(GenerationMixin, function)).__code__.co_varnames
    gone = {name: names[name] for name in names.keys() - set(there)}
    assert not gone, (
        f"GenerationMixin.{function}() of transformers {RELEASE} has no local variables {gone}. "
        "kvboost_hf/compat/calls.py reads them: find what holds the same in this release, read that, and list it in "
        "tests/upstream.py."
    )


def test_the_variables_of_generate_mean_what_is_read(llama: LlamaForCausalLM) -> None:
    seen: dict[str, Any] = {}
    prompt = random_ids(24)

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        frame = generate_frame(sys._getframe())
        if frame is not None and not seen:
            seen.update(frame.f_locals, forward=kwargs)

    with llama.register_forward_pre_hook(look, with_kwargs=True):
        call: Any = llama.generate
        call(prompt, attention_mask=torch.ones_like(prompt), num_beams=2, max_new_tokens=3, do_sample=False)
    assert seen["inputs"] is prompt
    assert seen["input_ids_length"] == 24
    assert seen["generation_config"] is not llama.generation_config
    assert seen["generation_config"].max_length == 27
    assert seen["input_ids"].shape == (2, 24)
    assert seen["decoding_method"] is GenerationMixin._beam_search
    assert seen["kwargs"]["max_new_tokens"] == 3
    assert seen["kwargs"]["attention_mask"].shape == (1, 24)
    assert seen["model_kwargs"][CACHE] is seen["forward"][CACHE]


def test_the_variables_of_what_runs_forwards_mean_what_is_read(llama: LlamaForCausalLM) -> None:
    prompt = random_ids(24)
    seen: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name not in upstream.LOCALS:
            frame = frame.f_back
        assert frame is not None
        seen.append((frame.f_code.co_name, dict(frame.f_locals), kwargs))

    call: Any = llama.generate
    ways: list[dict[str, Any]] = [{"prefill_chunk_size": 16}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}]
    with llama.register_forward_pre_hook(look, with_kwargs=True):
        for way in ways:
            call(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False, **way)
    assert {name for name, _, _ in seen} == upstream.LOCALS.keys() - {
        "generate",
        "_extract_generation_mode_kwargs",
    }
    for name, variables, forward in seen:
        assert variables["self"] is llama
        assert variables["model_inputs"]["input_ids"] is forward["input_ids"], name
        assert variables["generation_config"].max_length == 28
    pieces = [variables for name, variables, _ in seen[:2]]
    assert [piece["input_chunk"] is piece["input_chunks"][-1] for piece in pieces] == [False, True]
    drafting = [variables["candidate_generator"] for name, variables, _ in seen if name == "_assisted_decoding"]
    assert drafting[0].num_output_tokens == 3
    rounds = [variables for name, variables, _ in seen if name == "_assisted_decoding"]
    assert rounds[0]["input_ids"].equal(prompt)
    assert rounds[0]["stopping_criteria"][0].max_length == 28
    assert list(rounds[0]["logits_processor"]) == []


def test_a_loop_of_ones_own_is_asked_for_its_arguments_when_the_tokenizer_was_taken(llama: LlamaForCausalLM) -> None:
    seen: list[Any] = []

    class Loop:
        @property
        def __signature__(self) -> inspect.Signature:
            seen.append(sys._getframe(1))
            return inspect.signature(lambda model, tokenizer=None, **kwargs: None)

        def __call__(self, model: Any, input_ids: Any, **kwargs: Any) -> Any:
            return input_ids

    tokenizer = object()
    call: Any = llama.generate
    call(random_ids(4), custom_generate=Loop(), tokenizer=tokenizer, max_new_tokens=1)
    frame = seen[0]
    while frame.f_code.co_name != "_extract_generation_mode_kwargs":
        frame = frame.f_back
    assert "tokenizer" not in frame.f_locals["kwargs"]
    assert frame.f_locals["generation_mode_kwargs"] == {}  # what the loop takes by other names


def test_a_cache_is_marked_before_it_is_asked_for_its_length(llama: LlamaForCausalLM) -> None:
    told: list[str] = []

    class Watched(transformers.DynamicCache):
        def __setattr__(self, name: str, value: object) -> None:
            told.extend(["marked"] if name == "_is_user_defined" else [])
            super().__setattr__(name, value)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            told.append("asked")
            return super().get_seq_length(layer_idx)

    call: Any = llama.generate
    call(random_ids(8), past_key_values=Watched(config=llama.config), max_new_tokens=2, do_sample=False)
    assert told[0] == "marked", (
        f"generate() of transformers {RELEASE} did {told[:3]} to a cache that it was given: `ChunkReuseCache` is "
        "armed too late (docs/design.md, The seam)."
    )
    assert "asked" in told


def layers_of_transformers() -> set[str]:
    """The classes of cache layers, also those that live with their model, by name."""
    bases = {"CacheLayerMixin", "LinearAttentionCacheLayerMixin"}
    written = re.compile(r"^class (\w+)\(([\w, ]+)\):", re.MULTILINE)
    texts = [inspect.getsource(cache_utils)]
    folder = Path(transformers.__file__).parent / "models"
    texts += [path.read_text("utf-8") for path in sorted(folder.glob("*/modeling_*.py"))]
    classes = [found for text in texts for found in written.findall(text)]
    known, found = set(bases), {"DummyLayer"} & set(vars(cache_utils))  # which has no base
    while True:
        more = {name for name, of in classes if known.intersection(re.split(r",\s*", of))} - known
        if not more:
            return found | known - bases
        known |= more


def test_every_cache_layer_is_known() -> None:
    found, known = layers_of_transformers(), SERVED_LAYERS | upstream.NOT_SERVED.keys()
    assert SERVED_LAYERS.isdisjoint(upstream.NOT_SERVED)
    assert found <= known, (
        f"transformers {RELEASE} has cache layers {sorted(found - known)}. Models that use them run without reuse. "
        "Serve them in kvboost_hf/cache/kv/model_form.py (SERVED_LAYERS in compat/models.py), or list them in "
        "NOT_SERVED of tests/upstream.py, with what they are."
    )
    expected = known - upstream.LATER if Version("5.23") > RELEASE else known
    assert expected <= found, (
        f"transformers {RELEASE} has no cache layers {sorted(expected - found)} any more. If they were renamed, add "
        "the new names in kvboost_hf/cache/kv/model_form.py, and keep the old ones as long as pyproject.toml allows "
        "releases that have them."
    )


class TestChangesAreNoticed:
    """Each test above fails where a release changes what it looks at."""

    def test_a_name_that_is_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(GenerationMixin, "_prefill")
        assert not has(LISTED["_prefill"], "_prefill")

    def test_a_local_variable_that_is_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def generate(self: Any, inputs: Any, generation_config: Any, **kwargs: Any) -> Any: ...

        monkeypatch.setattr(GenerationMixin, "generate", generate)
        with pytest.raises(AssertionError, match=r"has no local variables .*model_kwargs"):
            test_the_local_variables_exist("generate")

    @pytest.mark.parametrize(
        "change", ["", "class NewLayer(DynamicSlidingWindowLayer):", "class NewLayer(New, StaticLayer):"]
    )
    def test_a_layer_that_is_new(self, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
        source = inspect.getsource
        monkeypatch.setattr(
            inspect, "getsource", lambda of: source(of) + (f"\n{change}\n" if of is cache_utils else "")
        )
        if not change:
            test_every_cache_layer_is_known()
            return
        with pytest.raises(AssertionError, match=r"has cache layers \['NewLayer'\]"):
            test_every_cache_layer_is_known()

    def test_a_layer_that_is_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source = inspect.getsource
        monkeypatch.setattr(
            inspect, "getsource", lambda of: source(of).replace("class QuantizedLayer(", "class Renamed(")
        )
        with pytest.raises(AssertionError, match=r"Renamed"):
            test_every_cache_layer_is_known()
