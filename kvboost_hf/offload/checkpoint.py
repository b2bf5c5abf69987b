"""Loads a model layer by layer from the files of its checkpoint."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from kvboost_hf.offload.disk import Origin
from kvboost_hf.offload.units import Holder, persistent_holders, shared_tensors


class Checkpoint:
    """The files of a checkpoint, and the layer of the model that each of their tensors belongs to.

    Args:
        model: On the meta device.
        files: Paths of safetensors files.
        quantizer: Passed to transformers.

    Raises:
        ValueError: the files are no safetensors files, or damaged.
    """

    def __init__(self, model: PreTrainedModel, files: Sequence[str] | None, quantizer: Any) -> None:
        wrong = [file for file in files or () if not file.endswith(".safetensors")]
        if not files or wrong:
            raise ValueError(
                f"Layers are streamed from safetensors files, got {wrong or files}. Save the model once with "
                "save_pretrained(), which writes them."
            )
        self._model, self._quantizer, self._dtype = model, quantizer, model.dtype
        self._keep_dtypes()
        self._conversions = get_model_conversion_mapping(model, None, quantizer)
        self._files: dict[str, str] = {}  # name of a tensor -> path
        for path in files:
            with open_shard(path) as file:
                self._files |= dict.fromkeys(file.keys(), path)
        self._parts: list[dict[str, Holder]] = []  # of each layer, by full name
        self._meta: dict[str, torch.Tensor] = {}
        self._keys: list[list[str]] = []  # of each layer, names in the files
        self._prefixes: list[str] = []  # of each layer, the prefix of its full names

    def quantized(self, words: str) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shapes of the tensors of each packed weight, by the name of its module and by their own last names.

        Args:
            words: Last name of the tensor that packs a weight.
        """
        names = dict.fromkeys(self._model.state_dict(), True)
        modules = {key.removesuffix(f".{words}") for key in self._files if key.endswith(f".{words}")}
        keys: dict[str, list[str]] = {}  # in the files, by path
        for key, path in self._files.items():
            if key.rpartition(".")[0] in modules:
                keys.setdefault(path, []).append(key)
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for path, inside in keys.items():
            with open_shard(path) as file:
                for key in inside:
                    module, _, name = key.rpartition(".")
                    shapes.setdefault(module, {})[name] = tuple(file.get_slice(key).get_shape())
        renamed = {module: self._rename(f"{module}.weight", names, merged=False) for module in shapes}
        return {renamed[module].removesuffix(".weight"): found for module, found in shapes.items()}

    def origin(self, order: str | None = None) -> Origin:
        """What the layers of the model come from: the files, and the dtype they are loaded as.

        Args:
            order: The name of the order of 4-bit codes, on a CPU.
        """
        paths = sorted({os.path.realpath(path) for path in self._files.values()})
        return Origin(str(self._model.name_or_path), tuple(paths), f"{self._dtype}{order or ''}")

    def take_out(self, layers: Sequence[nn.Module]) -> None:
        """Remove the tensors of all layers from the model, so that transformers does not load them with the rest."""
        model = self._model
        modules = {id(module): name for name, module in model.named_modules()}
        shared = shared_tensors(model, layers)
        self._prefixes = prefixes = [f"{modules[id(layer)]}." for layer in layers]
        for prefix, layer in zip(prefixes, layers, strict=True):
            self._parts.append(
                {prefix + name: holder for name, holder in persistent_holders(layer) if _is_own(holder, shared)}
            )
        self._keys = self._assign(prefixes)
        for part in self._parts:
            for name, holder in part.items():
                tensor = holder.get()
                assert tensor is not None
                self._meta[name] = tensor
                holder.put(None)
        for layer in layers:
            for module in layer.modules():
                if not module._non_persistent_buffers_set:  # which are still to be computed
                    module._is_hf_initialized = True  # type: ignore[assignment]
        # Of these names transformers need not warn.
        known = {*self._meta, *(key for keys in self._keys for key in keys)}
        known |= {name.removeprefix(f"{model.base_model_prefix}.") for name in self._meta}
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            f"^{any_of(known)}$",
        }

    def put_back(self, number: int, streamed: Sequence[str]) -> bool:
        """Give a layer its tensors back, on the meta device.

        Args:
            number: The number of the layer.
            streamed: Prefixes of the names of streamed tensors in the layer.

        Returns:
            Whether it has tensors that are not streamed.
        """
        for name, holder in self._parts[number].items():
            holder.put(self._meta[name])
        return len(self._streamed(number, streamed)) < len(self._parts[number])

    def load(self, number: int, device: torch.device, streamed: Sequence[str]) -> None:
        """Load the tensors of a layer.

        Args:
            number: The number of the layer, whose tensors have been put back.
            device: The device to load to.
            streamed: Prefixes of the names of tensors that are loaded to host memory instead.

        Raises:
            ValueError: the files lack some of them, or have other shapes.
        """
        part = self._parts[number]
        model = self._model
        to_host = dict.fromkeys(self._streamed(number, streamed), torch.device("cpu"))
        settings = LoadStateDictConfig(
            device_map={"": device, **to_host},
            dtype=self._dtype,
            dtype_plan=model._get_dtype_plan(self._dtype),
            hf_quantizer=self._quantizer,
            weight_mapping=self._conversions,  # type: ignore[arg-type]
        )
        with ExitStack() as stack, without_bars():
            files: dict[str, Any] = {}
            tensors = {}
            for key in self._keys[number]:
                path = self._files[key]
                if path not in files:
                    files[path] = stack.enter_context(open_shard(path))
                tensors[key] = files[path].get_slice(key)
            found, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
        missing = [name for name in part if name in found.missing_keys]
        wrong = [(name, *shapes) for name, *shapes in found.mismatched_keys if name in part]
        for name, holder in part.items():  # before 5.23 transformers takes any shape where there is a quantizer
            tensor, expected = holder.get(), self._meta[name].shape
            if tensor is not None and tensor.shape != expected:
                wrong.append((name, tensor.shape, expected))
        if missing or wrong or found.conversion_errors:
            raise ValueError(_complaint(missing, wrong, found.conversion_errors))

    def _keep_dtypes(self) -> None:
        """Cast tensors that stay in float32 on the meta device, so that sizes are planned with that dtype."""
        plan = self._model._get_dtype_plan(self._dtype)
        if not plan:
            return
        pattern, groups, _ = build_glob_alternation(list(plan))
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            found = pattern.search(name)
            if found is not None and found.lastgroup is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(plan[groups[found.lastgroup]])

    def _streamed(self, number: int, streamed: Sequence[str]) -> list[str]:
        starts = tuple(self._prefixes[number] + start for start in streamed)
        return [name for name in self._parts[number] if name.startswith(starts)]

    def _assign(self, prefixes: Sequence[str]) -> list[list[str]]:
        """The names in the files that belong to each layer."""
        numbers = {prefix: number for number, prefix in enumerate(prefixes)}
        names = dict.fromkeys(self._model.state_dict(), True)
        found: list[list[str]] = [[] for _ in prefixes]
        for key in sorted(self._files):
            name = self._rename(key, names)
            cuts = [match.end() for match in re.finditer(r"\.", name)]
            number = next((numbers[name[:cut]] for cut in cuts if name[:cut] in numbers), None)
            if number is not None:
                found[number].append(key)
        return found

    def _rename(self, key: str, names: dict[str, bool], *, merged: bool = True) -> str:
        """The name in the model of a tensor in the files, or of the first tensor that it is merged into."""
        renamings = [entry for entry in self._conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._conversions if isinstance(entry, WeightConverter) and merged]
        found: str = rename_source_key(key, renamings, converters, self._model.base_model_prefix, names)[0]
        return found


def open_shard(path: str) -> Any:
    """Open a safetensors file of a checkpoint, as a context manager.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path} must be a whole safetensors file, got a damaged one of {os.path.getsize(path)} bytes ({error}). "
            "Delete it, and download it again."
        ) from error


def any_of(names: Iterable[str]) -> str:
    """A pattern for exactly these names, by common prefixes, since models with experts have 100,000 names.

    Example:
        >>> any_of(["h.0.weight", "h.0.bias", "h.1.bias"])
        '(?:h\\\\.(?:0\\\\.(?:bias|weight)|1\\\\.(?:bias)))'
    """
    rests: dict[str, list[str]] = {}  # by what comes first
    for name in sorted(names):
        first, dot, rest = name.partition(".")
        rests.setdefault(first + dot, []).append(rest)
    parts = (re.escape(first) + (any_of(found) if first.endswith(".") else "") for first, found in rests.items())
    return f"(?:{'|'.join(parts)})"


def _is_own(holder: Holder, shared: set[int]) -> bool:
    """Whether a tensor can be loaded later, and is not needed to compute buffers that are not saved."""
    tensor = holder.get()
    return tensor is not None and id(tensor) not in shared and not holder.module._non_persistent_buffers_set


def _complaint(missing: list[str], wrong: list[tuple[Any, ...]], errors: Any) -> str:
    if wrong:
        name, has, expected = wrong[0]
        return (
            f"{name} has the shape {tuple(has)} in the checkpoint, and {tuple(expected)} in the model. The files and "
            "config.json do not belong together; download both again."
        )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return (
            f"The checkpoint has no {missing[0]}{more}. Either a file of it is missing, or it is not for this "
            "architecture."
        )
    return f"The checkpoint cannot be converted: {errors}."


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable the progress bars of transformers, one of which would appear for each layer."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
