"""The schemas of requests. Fields that are not here are ignored and named in a header, or refused: see `Body`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from kvboost_hf.server.answer_form import FormFields
from kvboost_hf.server.chat_messages import Content, Message, text_of
from kvboost_hf.server.fields import Body, Many, Refusal, absent
from kvboost_hf.server.jobs import Reuse
from kvboost_hf.server.rendering import Rendering
from kvboost_hf.server.template_fields import ReasoningFields

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 1000
MAX_TEXTS = 2048  # to embed, as in OpenAI's API
MAX_BIASES = 10_000
MAX_STOP_TOKENS = 1000


def _as_biases(given: Any) -> Any:
    """Pairs of a token and its bias as a dict; `false` for a token that must not come, as llama.cpp takes it."""
    if isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        return {str(token): -100 if bias is False else bias for token, bias in given}
    return given


_Id = Annotated[int, Field(strict=True)]
_Token = Annotated[int, Field(ge=0)]
_Added = Annotated[float, Field(ge=-100, le=100)]
_Bias = Annotated[dict[_Token, _Added], Field(max_length=MAX_BIASES, fail_fast=True), BeforeValidator(_as_biases)]
_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Length = Annotated[Annotated[int, Field(ge=1)] | None, absent(-1)]


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


class StreamOptions(Body):
    """Options of a stream."""

    place: ClassVar = "stream_options"
    include_usage: bool = False


class Request(Body):
    """The fields that all requests for text have."""

    model: str | None = None
    """The model's name, or one of `--model-alias`; the only model where it is left out."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """With 0 only the likeliest token is left."""
    stream: bool | None = None
    """Server-sent events."""
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    """Requests share K/V only with requests of the same key."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Requests share K/V only with requests of the same salt, as in vLLM."""
    modalities: Annotated[Any, Refusal("answers are text; leave modalities out, or pass ['text']", ["text"])] = None
    audio: Annotated[Any, Refusal("answers are text; leave audio out")] = None
    web_search_options: Annotated[Any, Refusal("the server searches nothing; offer a tool that does")] = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """Pins the K/V of the prompt in host memory, for 10 minutes or 24 hours after each use."""
    priority: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] | None = None
    """Of the waiting requests of one client, those with the smallest number run first."""
    repair: Reuse | None = None
    """How K/V of text that has moved is used, in place of the server's policy: `exact` uses none."""


class Sampled(FormFields, Request):
    """The fields of both kinds of completions."""

    n: Annotated[int, Field(ge=1)] | None = None
    """Answers to one prompt; `prompts x n` may be 16."""
    max_tokens: Length = None
    """-1 for no limit but the context."""
    stop: str | Annotated[Many[str], Field(max_length=MAX_STOPS)] | None = None
    """Texts that end the answer and are left out of it; empty ones are ignored."""
    include_stop_str_in_output: bool | None = None
    """Leave what ends the answer in it: a stop text, or the token's text."""
    stop_token_ids: Annotated[Many[_Token], Field(max_length=MAX_STOP_TOKENS)] | None = None
    """Tokens that end the answer, besides those of the model."""
    ignore_eos: bool | None = None
    """The model's tokens for an end do not end the answer; they count as any other."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Nothing ends the answer before it has so many tokens, but the end of what a grammar allows."""
    skip_special_tokens: bool | None = None
    """`false` leaves special tokens in the text. With tools they are read, and the field changes nothing."""
    seed: _Int64 | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: _Bias | None = None
    """By token id, or a list of pairs; `false` in a pair for a token that must not come."""
    stream_options: StreamOptions | None = None
    top_k: Annotated[
        Annotated[int, Field(ge=0)] | None, BeforeValidator(lambda given: 0 if given == -1 else given)
    ] = None
    """0 and -1 for all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Leave out the beginning of a prompt that has more tokens; -1 for as many as the context has."""

    @property
    def truncates(self) -> bool:
        """Whether the beginning of a prompt that is too long is left out."""
        return self.truncate_prompt_tokens is not None

    def truncated(self, ids: list[int]) -> list[int]:
        """The last tokens of a prompt, as many as are asked for."""
        most = self.truncate_prompt_tokens or 0
        return ids[-most:] if most > 0 else ids

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(text for text in given if text)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class Prediction(Body):
    """A text that the answer may have parts of, such as a file that is to be changed."""

    place: ClassVar = "prediction"
    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The content in one piece."""
        return text_of(self.content)


def _as_tools(given: Any) -> Any:
    """A chat with `functions` and `function_call` as one with `tools` and `tool_choice`, besides."""
    if not isinstance(given, dict):
        return given
    functions, call = given.get("functions"), given.get("function_call")
    for older, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if given.get(older) is not None and given.get(newer) is not None:
            raise ValueError(f"{older} is the older form of {newer}; leave one of them out")
    if call is not None and not functions:
        raise ValueError("function_call needs functions")
    found = dict(given)
    if isinstance(functions, list):
        found["tools"] = [{"type": "function", "function": function} for function in functions]
    if call is not None:
        found["tool_choice"] = {"type": "function", "function": call} if isinstance(call, dict) else call
    return found


_Choice = Literal["none", "auto", "required"] | Annotated[ToolChoice | AllowedTools, Field(discriminator="type")]


class ChatRequest(ReasoningFields, Sampled):
    """A request to `/v1/chat/completions`."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Length = None
    """As `max_tokens`, before which it counts."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """More than 0 asks for `logprobs`, too."""
    functions: Annotated[Many[Function], Field(max_length=MAX_TOOLS)] | None = None
    """An older form of `tools`: the answer has a `function_call` then."""
    function_call: Literal["none", "auto"] | FunctionName | None = None
    """An older form of `tool_choice`."""
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions; other types of tools are refused."""
    tool_choice: Annotated[_Choice | None, BeforeValidator(lambda given: "required" if given == "any" else given)] = (
        None
    )
    """`any` is another name of `required`."""
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    """Parts of it that are in the answer come faster, while the request runs alone; the answer is the same."""
    add_generation_prompt: bool | None = None
    """`false` leaves out the start of an answer at the end of the prompt."""
    continue_final_message: bool | None = None
    """The answer continues the last message, which is the assistant's."""

    @model_validator(mode="before")
    @classmethod
    def _modern(cls, given: Any) -> Any:
        return _as_tools(given)

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        known = [tool.function.name for tool in self.tools or ()]
        wrong = next((name for name in self._chosen if name not in known), None)
        if wrong is not None:
            raise ValueError(f"tool_choice must name one of tools, got {wrong!r}")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise ValueError("continue_final_message needs add_generation_prompt to be false; leave that out")
            if self.messages[-1].role != "assistant" or self.messages[-1].calls:
                raise ValueError("continue_final_message needs a last message of the assistant, without calls")
        return self

    @property
    def _chosen(self) -> list[str]:
        """The tools that `tool_choice` names."""
        if isinstance(self.tool_choice, AllowedTools):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return [self.tool_choice.function.name] if isinstance(self.tool_choice, ToolChoice) else []

    @property
    def rendering(self) -> Rendering:
        """How the chat template writes this chat."""
        continues, last = None, self.messages[-1]
        if self.continue_final_message:
            continues = "reasoning_content" if last.thoughts and not last.text else "content"
        answer = continues is None and self.add_generation_prompt is not False
        return Rendering(answer=answer, continues=continues, arguments=self.template_arguments)

    @property
    def reported(self) -> int | None:
        """How many other tokens are reported beside each one; None where no log probabilities are."""
        return self.top_logprobs or 0 if self.logprobs or self.top_logprobs else None

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call of a tool."""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice not in (None, "none", "auto")

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told of."""
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in self.tools or () if tool.function.name in self._chosen]
        return [] if self.tool_choice == "none" else list(self.tools or ())


def _kind_of_texts(given: Any) -> str:
    """Which kind of `Texts` this is; the first item of a list decides, so that others are errors of that kind."""
    if not isinstance(given, list):
        return "text"
    match given[:1]:
        case [list()]:
            return "token_lists"
        case [int()]:
            return "tokens"
        case _:
            return "texts"


Texts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Many[str], Tag("texts")]
    | Annotated[Many[_Id], Tag("tokens")]
    | Annotated[Many[Many[_Id]], Tag("token_lists")],
    Discriminator(_kind_of_texts),
]


def _as_list(texts: Texts) -> list[str | list[int]]:
    if isinstance(texts, str):
        return [texts]
    tokens = [one for one in texts if isinstance(one, int)]
    return [tokens] if tokens else [one for one in texts if not isinstance(one, int)]


class CompletionRequest(Sampled):
    """A request to `/v1/completions`."""

    prompt: Texts
    """Texts, or lists of token ids."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, absent(-1)] = None
    """16 where it is left out, or -1. 0 with `echo` for the prompt alone."""
    echo: bool | None = None
    """Begin the answer with the prompt; with `logprobs`, with the log probabilities of its tokens, too: all of it is
    computed then, without reuse."""
    suffix: str | None = None
    """The text behind the answer, for models with tokens to fill in the middle; not with prompts of tokens."""
    add_special_tokens: bool | None = None
    """`false` leaves out what the tokenizer puts around a text, such as a token that begins it."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Compute so many answers, and return the `n` with the highest mean log probability of their tokens."""

    @model_validator(mode="after")
    def _fits_together(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be 1 or more without echo, got 0")
        if self.best_of is not None and self.best_of < self.answers:
            raise ValueError(f"best_of must be n, {self.answers}, or more, got {self.best_of}")
        if self.stream and self.computed > self.answers:
            raise ValueError(f"best_of must be n, {self.answers}, in a stream, got {self.best_of}; leave one out")
        if not self.prompts:
            raise ValueError("prompt must not be an empty list")
        if self.suffix and not isinstance(self.prompts[0], str):
            raise ValueError("suffix needs prompts of text, got tokens")
        return self

    @property
    def answers(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def computed(self) -> int:
        """Answers to each prompt that are computed."""
        return self.best_of or self.answers

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or tokens to continue."""
        return _as_list(self.prompt)


class EmbeddingRequest(Body):
    """A request to `/v1/embeddings`."""

    model: str | None = None
    input: Annotated[Texts, Field(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Any, Refusal("all numbers of an embedding are returned; leave dimensions out")] = None

    @property
    def texts(self) -> list[str | list[int]]:
        """Texts or tokens to embed."""
        return _as_list(self.input)


class WarmRequest(Body):
    """A request to `/v1/warm`: texts, or a chat, that prompts will start with."""

    texts: Annotated[Many[str], Field(min_length=1)] | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """As in requests for answers."""

    @model_validator(mode="after")
    def _one_of_them(self) -> "WarmRequest":
        if (self.texts is None) == (self.messages is None):
            raise ValueError("either texts or messages must be given")
        if self.tools and self.messages is None:
            raise ValueError("tools need messages")
        return self


class SessionRequest(Body):
    """What to change of what is kept of a session."""

    pinned: Annotated[bool, Field(strict=True)] | None = None
    ttl_s: Annotated[float, Field(gt=0, le=30 * 86_400)] | None = None
    priority: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "SessionRequest":
        if self.pinned is False and self.ttl_s is not None:
            raise ValueError("ttl_s must be left out where pinned is false")
        if self.pinned is None and self.ttl_s is None and self.priority is None:
            raise ValueError("one of pinned, ttl_s and priority must be given")
        return self
