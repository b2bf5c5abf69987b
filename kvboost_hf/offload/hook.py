"""The accelerate hook that streams a layer."""

from typing import Any, NoReturn

import torch
from accelerate.hooks import ModelHook
from torch import nn

from kvboost_hf.checksum import Content
from kvboost_hf.errors import StreamingError
from kvboost_hf.offload.stream import LayerStream


class LayerStreamingHook(ModelHook):  # type: ignore[misc]
    """Waits for the weights of one layer before its forward, and starts copies of later layers after it.

    `load_streamed()` and `stream_layers()` add one to each streamed layer. accelerate's
    `remove_hook_from_submodules(model)` removes them and gives the layers their weights back, in host memory.

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
        """Wait until the weights are in the slot."""
        self.stream.enter(self.number)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Release the slot. A gradient through the output is refused later, since the weights are gone by then."""
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
    def weights_at_rest(self) -> dict[int, tuple[torch.Tensor, torch.Tensor | Content]]:
        """See `LayerStream.weights_at_rest`."""
        return self.stream.weights_at_rest(self.number)


def _refuse_gradient(_: torch.Tensor) -> NoReturn:
    raise StreamingError(
        "Gradients cannot pass through streamed layers, whose weights are gone by then. Call stop_streaming(model) to "
        "train."
    )
