"""The fields of a request that a chat template reads, and those about reasoning."""

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from kvboost_hf.server.chats.rendering import RESERVED, reasoning_arguments
from kvboost_hf.server.requests.fields import Body, Refusal


def _unreserved(given: dict[str, Any]) -> dict[str, Any]:
    wrong = next((name for name in given if name in RESERVED), None)
    if wrong is not None:
        raise ValueError(f"it must not have {wrong!a}, which the server gives to the template; leave that out")
    return given


_Effort = Annotated[str, Field(max_length=32)]


class ReasoningOptions(Body):
    """How a model reasons."""

    place: ClassVar = "reasoning"
    effort: _Effort | None = None
    """As `reasoning_effort`."""
    enabled: bool | None = None
    """As `enable_thinking`."""
    exclude: bool | None = None
    """Leave the reasoning out of the answer."""
    summary: str | None = None
    """Changes nothing: reasoning is returned as the model writes it."""


class ReasoningFields(Body):
    """The fields about reasoning, as several servers name them; and other arguments of the chat template."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_unreserved)] | None = None
    """Arguments of the model's chat template, such as `{"enable_thinking": false}`; those that it does not read change
    nothing."""
    chat_template: Annotated[
        Any, Refusal("a template is code, which the operator chooses; pass chat_template_kwargs")
    ] = None
    reasoning_effort: _Effort | None = None
    """Given to the chat template. `none` and `minimal` switch reasoning off, others on, where the template has a
    switch."""
    reasoning: ReasoningOptions | None = None
    """The same as an object."""
    enable_thinking: bool | None = None
    """Switch reasoning on or off, where the chat template has a switch."""
    think: bool | _Effort | None = None
    """A switch, or an effort."""
    include_reasoning: bool | None = None
    """`false` leaves the reasoning out of the answer; its tokens count."""

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The arguments of the chat template besides messages and tools."""
        options = self.reasoning or ReasoningOptions()
        thinks = self.enable_thinking
        if thinks is None:
            thinks = self.think if isinstance(self.think, bool) else options.enabled
        effort = self.reasoning_effort or options.effort or (self.think if isinstance(self.think, str) else None)
        return reasoning_arguments(thinks, effort) | (self.chat_template_kwargs or {})

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer has the reasoning."""
        return self.include_reasoning is not False and not (self.reasoning is not None and self.reasoning.exclude)
