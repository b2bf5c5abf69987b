"""`Engine`: the protocol of what runs jobs, the errors with which it refuses them, and the card of its model."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, Protocol

from kvboost_hf.server.jobs import Job, Listener, Session, SessionChange

_SIZES = {  # as GGUF files name them, which Ollama's clients read, and as transformers' configurations do
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
UNLIMITED = 2**31  # tokens of the context of a model that has no table of positions
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class QueueFullError(RuntimeError):
    """The queue is full.

    Args:
        retry_after_s: Seconds after which there may be room.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLongError(ValueError):
    """A prompt exceeds the memory or the positions of the model.

    Args:
        max_prompt_tokens: The longest prompt that there is room for, with as many new tokens.
        tokens: How many tokens the prompt has; None if they were not counted.
        limit: Tokens of a prompt and its answer, at most; None if that is not known.
        estimated: Whether `tokens` is an estimate, because the text was not tokenized.
        what: What is too long, as messages to clients call it.
    """

    def __init__(
        self,
        message: str,
        max_prompt_tokens: int,
        *,
        tokens: int | None = None,
        limit: int | None = None,
        estimated: bool = False,
        what: Literal["messages", "prompt", "text"] = "prompt",
    ) -> None:
        super().__init__(message)
        self.max_prompt_tokens, self.tokens, self.limit = max_prompt_tokens, tokens, limit
        self.estimated, self.what = estimated, what


class DrainingError(RuntimeError):
    """The server takes no more jobs: it is about to end."""


class UnreachableTierError(RuntimeError):
    """A tier did not take a deletion. It is told again when it answers, as long as this process runs.

    Args:
        tiers: The names of all that did not.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        super().__init__(f"These tiers did not answer: {', '.join(tiers)}.")


class Ticket(Protocol):
    """A job that an engine has taken."""

    def cancel(self) -> None:
        """End the job as soon as possible; `Finished("cancelled")` follows. Any thread may call it, repeatedly."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a model is."""

    family: str  # the type of its architecture, such as `"llama"`
    parameters: int = 0  # the number of its parameters
    num_bytes: int = 0  # bytes of its weights
    gpu_bytes: int = 0  # those of them that are on a GPU
    # How its weights are stored: `"F32"`, `"F16"`, `"BF16"`, or the method of quantization.
    quantization: str = "unknown"
    # Numbers of layers, heads and features, as GGUF files name them.
    sizes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> "ModelCard":
        """The card of a `PreTrainedModel`."""
        config = model.config.get_text_config(decoder=True)
        dtype = str(model.dtype).removeprefix("torch.")
        quantized = getattr(model.config, "quantization_config", None) or {}
        method = (quantized if isinstance(quantized, dict) else quantized.to_dict()).get("quant_method")
        tensors = list(chain(model.parameters(), model.buffers()))
        sizes = {name: getattr(config, attribute, None) for name, attribute in _SIZES.items()}
        return cls(
            family=str(model.config.model_type),
            parameters=int(model.num_parameters()),
            num_bytes=sum(tensor.nbytes for tensor in tensors),
            gpu_bytes=sum(tensor.nbytes for tensor in tensors if tensor.device.type not in ("cpu", "meta")),
            quantization=str(getattr(method, "value", method) or _DTYPES.get(dtype, dtype)),
            sizes={name: size for name, size in sizes.items() if isinstance(size, int)},
        )

    @property
    def parameter_size(self) -> str:
        """The number of parameters, for people, such as `"134.5M"`."""
        for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
            if self.parameters >= unit:
                return f"{self.parameters / unit:.1f}{letter}"
        return str(self.parameters)


class Drains(Protocol):
    """Takes requests, and can end in order."""

    def drain(self, timeout_s: float) -> bool:
        """Take no more, and wait for those that were taken. After `timeout_s` those that are left are cancelled.

        Any thread may call it, any number of times.

        Returns:
            Whether all of them ended in time.
        """
        ...


class Engine(Drains, Protocol):
    """Runs jobs."""

    @property
    def vocab_size(self) -> int:
        """Columns of the model's logits."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together, at most, by context and memory: a job with more cannot run."""
        ...

    @property
    def model_card(self) -> ModelCard:
        """What the model is."""
        ...

    def submit(self, job: Job, listener: Listener) -> Ticket:
        """Queue a job. Any thread may call it.

        Raises:
            QueueFullError: The queue is full.
            TooLongError: The job can never run.
            DrainingError: The engine takes no more jobs.
        """
        ...

    def embed(self, texts: Sequence[Sequence[int]], client: bytes = b"") -> Future[list[list[float]]]:
        """Queue texts to embed. Any thread may call it.

        Args:
            texts: Token ids of each text, at least one.
            client: Who asks; see `Job.client`.

        Returns:
            A future with an embedding of each text. It may be cancelled.

        Raises:
            QueueFullError: The queue is full.
            TooLongError: A text is longer than the model's context.
            DrainingError: The engine takes no more jobs.
        """
        ...

    def sessions(self, client: bytes | None, id: str | None = None) -> list[Session]:
        """The sessions of a client, of all clients for None, or one of them; those used last come first.

        This and the two methods below may be called by any thread. They wait for the model's thread, and for tiers.

        Raises:
            DrainingError: The engine has ended.
        """
        ...

    def change_session(self, client: bytes, id: str, change: SessionChange) -> Session | None:
        """Change what is kept of a session; None if there is none. `Session.pinned` says what has become of it."""
        ...

    def drop_session(self, client: bytes, id: str, salt: bytes) -> dict[str, int] | None:
        """Remove a session and its K/V from all tiers. Its requests under way go on, and keep nothing.

        K/V that other sessions of the client begin with stays.

        Args:
            client: Whose it is.
            id: The name of the session, or its hash.
            salt: The salt of the jobs with this name; their K/V is removed even if the session is forgotten.

        Returns:
            By tier, the bytes that were removed; None if there is no such session, and no such K/V.

        Raises:
            UnreachableTierError: The K/V is removed here, but not everywhere. The session is still listed.
        """
        ...

    def known_tokens(self, prompts: Sequence[Sequence[int]], salt: bytes) -> list[int]:
        """How many first tokens of each prompt are stored for jobs with a salt; nothing is loaded.

        Any thread may call it. It waits for the model's thread.

        Raises:
            DrainingError: The engine has ended.
        """
        ...

    def load(self) -> dict[str, int]:
        """How many requests are `waiting`, read as `prompts`, and `running`, and whether it is `draining`."""
        ...

    def stats(self) -> dict[str, Any]:
        """Current figures, as numbers, strings, and dicts of them. It waits for tiers."""
        ...
