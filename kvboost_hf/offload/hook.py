"""The hook of accelerate by which a layer is streamed."""

from typing import Any, NoReturn

import torch
from accelerate.hooks import ModelHook
from torch import nn

from kvboost_hf.errors import StreamingError
from kvboost_hf.offload.stream import LayerStream


class LayerStreamingHook(ModelHook):  # type: ignore[misc]
    """Brings the weights of one layer into their slot before its forward, and sends for later ones behind it.

    `load_streamed()` and `stream_layers()` put one on each streamed layer; accelerate's
    `remove_hook_from_submodules(model)` takes them off again and gives the layers their weights back, in host memory.

    Args:
        stream: The streamed layers of the model.
        number: Which of them the hook is for.
    """

    leaves_kv_alone = True  # read by the fingerprint of models

    def __init__(self, stream: LayerStream, number: int) -> None:
        self.stream, self.number = stream, number

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Make the weights of the module views into the slot."""
        self.stream.bind(self.number)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have the weights in the slot."""
        self.stream.enter(self.number)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Give the slot to the next one. A gradient that comes back is refused: it would meet other weights."""
        self.stream.leave(self.number)
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Give the module its weights back, in host memory."""
        self.stream.unbind(self.number)
        return module

    @property
    def weights_at_rest(self) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        """By the id of each tensor in the slot: it, and where its values are kept in host memory; None: in a file."""
        return self.stream.weights_at_rest(self.number)

    @property
    def files_at_rest(self) -> tuple[str, ...]:
        """The file with the weights, if they are in one."""
        return self.stream.files_at_rest(self.number)


def _refuse_gradient(_: torch.Tensor) -> NoReturn:
    raise StreamingError(
        "Gradients cannot pass through streamed layers, whose weights are gone by then. Call stop_streaming(model) to "
        "train."
    )
