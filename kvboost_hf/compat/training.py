"""Finds out whether a model in training mode computes the same for the same tokens each time."""

import inspect
import pickle
import random
import re
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from kvboost_hf.compat.attention import attention_function
from kvboost_hf.compat.memo import attempt, remember
from kvboost_hf.compat.probes import difference, probe_ids, probe_logits, probe_reason, tolerance

_RATE = re.compile("drop|jitter|noise")  # in the names of attributes that modules draw random numbers by
_TOKENS = 4  # in each of two equal rows
_COPIED_BYTES = 2**20  # of a buffer; larger ones hold weights


def training_reason(model: PreTrainedModel, settings: Hashable) -> str | None:
    """Why K/V that `model` computes in training mode may depend on more than tokens, or None.

    Dropout and its kin are found by the attributes of modules, and by a run on a few tokens, which leaves the states
    of random number generators and the buffers as they were. Once per dtype, attention and `settings`.

    Args:
        model: The model, a part of which is in training mode.
        settings: Changes with every attribute and configuration that a forward may read.
    """
    key = training_reason, model.dtype, attention_function(model), settings
    return remember(model, key, lambda: attempt(model, lambda: _find(model), "it fails in training mode"))


def checkpointing_reason(model: PreTrainedModel) -> str | None:
    """Why layers of a model in training mode are computed without a cache, or None."""
    if any(module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return "gradient checkpointing keeps the cache from the layers (call model.gradient_checkpointing_disable())"
    return None


@torch.no_grad()
def _find(model: PreTrainedModel) -> str | None:
    if (reason := checkpointing_reason(model)) is not None:
        return reason
    for path, module in model.named_modules():
        if module.training and (rate := _rate(module)) is not None:
            name, value = rate
            return (
                f"in training mode, {path or type(module).__name__} changes values at random, by `{name}` = {value} "
                "(make it 0, or call model.eval())"
            )
    states, buffers = _Generators(model), _Buffers(model)
    try:
        rows = probe_logits(model, probe_ids(model)[:, :_TOKENS].expand(2, -1))
    finally:
        drawn, written = states.put_back(), buffers.put_back()
    if drawn or not difference(rows[1], rows[0]) <= tolerance(model.dtype):
        return "in training mode, it draws random numbers (call model.eval(), or make its dropout 0)"
    if written:
        return "in training mode, its forwards write to its buffers (call model.eval())"
    return probe_reason(model)


def _rate(module: nn.Module) -> tuple[str, float] | None:
    """The name and value of an attribute by which a module draws random numbers, or None."""
    rates = {"p": module.p} if isinstance(module, _DropoutNd) else module.__dict__
    for name, value in rates.items():
        if (name == "p" or _RATE.search(name)) and type(value) in (int, float) and value > 0:
            return name, value
    return None


class _Generators:
    """The states of the random number generators that modules draw from by default.

    Args:
        model: The model, for its devices.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
            (np.random.get_state, np.random.set_state),
        ]
        for device in {parameter.device for parameter in model.parameters()}:
            if device.type not in ("cpu", "meta"):
                module = torch.get_device_module(device)
                takes_device = "device" in inspect.signature(module.get_rng_state).parameters
                given = {"device": device} if takes_device else {}
                self._generators.append(
                    (partial(module.get_rng_state, **given), partial(module.set_rng_state, **given))
                )
        self._states = [get() for get, _ in self._generators]

    def put_back(self) -> bool:
        """Set the generators that have moved to what they were; returns whether one has."""
        moved = False
        for (get, put), state in zip(self._generators, self._states, strict=True):
            if _bytes(get()) != _bytes(state):
                put(state)
                moved = True
        return moved


def _bytes(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


class _Buffers:
    """The contents of the small buffers of a model, such as running means.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._kept = [(b, b.clone()) for b in model.buffers() if not b.is_meta and b.nbytes <= _COPIED_BYTES]

    def put_back(self) -> bool:
        """Set the buffers that were written to to what they were; returns whether one was."""
        written = False
        for buffer, kept in self._kept:
            if bool(((buffer != kept) & (kept == kept)).any()):  # what was NaN is equal to nothing
                buffer.copy_(kept)
                written = True
        return written
