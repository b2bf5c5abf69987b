"""The tools of a chat, and the choice among them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvboost_hf.server.requests.fields import Body, Many

MAX_TOOLS = 1000


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    place: ClassVar = "tools.function"
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool of a chat."""

    place: ClassVar = "tools"
    type: Literal["function"]
    function: Function

    @property
    def body(self) -> dict[str, Any]:
        """As chat templates take it."""
        return self.model_dump(exclude_none=True)


class FunctionName(Body):
    """Names a function."""

    place: ClassVar = "tool_choice.function"
    name: str


class ToolChoice(Body):
    """The tool to call."""

    place: ClassVar = "tool_choice"
    type: Literal["function"]
    function: FunctionName


class AllowedNames(Body):
    """Names the tools that may be called."""

    place: ClassVar = "tool_choice.allowed_tools"
    mode: Literal["auto", "required"]
    tools: Annotated[Many[ToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    """The tools that may be called; the model is told of no others."""

    place: ClassVar = "tool_choice"
    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames
