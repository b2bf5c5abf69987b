"""`KVBoost`: generates text with a model, and reuses K/V from a store."""

import logging
import time
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from transformers import PreTrainedModel

from kvboost_hf.assisted.chains import keeps_states
from kvboost_hf.assisted.load import load_assistant, speculation_stats
from kvboost_hf.assisted.rounds import SpeculationStats
from kvboost_hf.assisted.tree_decoding import TreeDecoding
from kvboost_hf.cache.prompt.chats import Message
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import available_device
from kvboost_hf.compatibility import check_model_compatibility
from kvboost_hf.config import ReusePolicy, StreamingConfig
from kvboost_hf.engine.load import load
from kvboost_hf.engine.prompts import CHECK_PROMPTS, Prompt, PromptEncoder, group_by_prefix
from kvboost_hf.engine.results import GenerationMode, GenerationResult, WarmResult, warm
from kvboost_hf.engine.runner import CallRunner, Watch, call_options
from kvboost_hf.engine.settings import SETTINGS, checked_settings, choice, settings_in_order, unknown_setting
from kvboost_hf.offload.build import streaming_stats
from kvboost_hf.offload.stream import StreamingStats
from kvboost_hf.old_names import missing, refuse
from kvboost_hf.verify import CorrectnessReport, verify_correctness
from kvboost_hf.verify.correctness import require_plain

_log = logging.getLogger("kvboost_hf")
DEFAULT_MODEL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"


class KVBoost:
    """Generates text with a model and its tokenizer, and reuses the K/V of earlier prompts from a store.

    Several threads may use it; their calls run one after the other. It keeps the K/V of its last prompt.

    Args:
        model: A causal language model in eval mode, not attached.
        tokenizer: The model's tokenizer.
        device: The device to move the model to; None leaves it where it is.
        strict: Raise an error for a model that cannot reuse K/V; False only warns.
        assistant: Drafts tokens for single prompts: a model, its name, a `TreeDecoding`, which drafts for batches,
            too, or `"auto"` for what the checkpoint carries, and else text that repeats, see `load_assistant`.
        policy: How stored K/V may be used, in place of `recompute_strategy` and the settings that go with it.
        store: A store for this model, in place of the settings of a new one. The caller closes it.
        options: The fields of `kvboost_hf.engine.EngineSettings`, such as `recompute_strategy` and `chunk_size`.

    Raises:
        ValueError: A setting is out of its range, settings do not go together, only the kvboost package has a setting,
            there is no such device, the model cannot be served, or the store is of another model.
        TypeError: There is no such setting.

    Example:
        >>> from kvboost_hf import KVBoost
        >>> from kvboost_hf.assets import load_embedded
        >>> engine = KVBoost(*load_embedded())
        >>> document = "Maria lives in Rome. She owns the lamp. It is red. " * 20
        >>> bool(engine.warm(document))
        True
        >>> result = engine.generate(document + "Where does Maria live?", max_new_tokens=8)
        >>> result.output_text, result.kv_reuse_ratio > 0.9
        ('Maria lives in Rome.', True)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *in_order: Any,
        device: torch.device | str | None = None,
        strict: bool = True,
        assistant: str | PreTrainedModel | TreeDecoding | None = None,
        policy: ReusePolicy | None = None,
        store: ChunkStore | None = None,
        **options: Any,
    ) -> None:
        if in_order:
            named = settings_in_order(in_order, {**options, **({} if device is None else {"device": device})})
            device = named.pop("device", device)
            options |= named
        refuse("KVBoost", options)
        self.settings = checked_settings(options, policy, store)
        if device is not None:
            model.to(available_device(device))  # type: ignore[arg-type]
        require_plain(model)
        if not callable(tokenizer):
            raise ValueError(
                f"`tokenizer` must be that of the model, got {tokenizer!r}. Pass AutoTokenizer.from_pretrained(NAME)."
            )
        check_model_compatibility(model, strict=strict)
        self.model, self.tokenizer = model, tokenizer
        self.policy = self.settings.policy() if policy is None else policy
        self._prompts = PromptEncoder(tokenizer, templated=self.settings.chat_template)
        self.store = self.settings.store(model, tokenizer) if store is None else store
        self.assistant: PreTrainedModel | TreeDecoding | None = None
        if isinstance(assistant, TreeDecoding):
            self.assistant = assistant
        elif assistant is not None:
            found = isinstance(assistant, str) and assistant == "auto"
            draft = load_assistant(model, store=self.store) if found else load_assistant(assistant, target=model)
            self.assistant = TreeDecoding(draft) if keeps_states(model) else draft  # transformers refuses states
        self._runner = CallRunner(model, tokenizer, self.store, self.policy, self.settings, self.assistant)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A KVBoost can be neither pickled nor copied: its store belongs to a model in this process. Make a new "
            "one."
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say what became of a method that only the kvboost package has."""
            raise AttributeError(missing(f"KVBoost.{name}"), name=name, obj=self)

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | PathLike[str] | None = None,
        strict: bool = True,
        *,
        streaming_config: StreamingConfig | None = None,
        device: torch.device | str | None = None,
        assistant: str | PreTrainedModel | TreeDecoding | None = None,
        policy: ReusePolicy | None = None,
        **options: Any,
    ) -> Self:
        """Load a model and its tokenizer.

        Args:
            model_name: A name on the hub, or a folder; also as `model_name_or_path` or `name`. None for
                `TinyLlama/TinyLlama-1.1B-Chat-v1.0`.
            strict: Raise an error for a model that cannot reuse K/V; False only warns.
            streaming_config: Stream the layers that do not stay on the device.
            device: Where the model computes; None for the accelerator, or the CPU where there is none.
            assistant: Drafts tokens for single prompts: a model, its name, a `TreeDecoding`, or `"auto"`.
            policy: How stored K/V may be used, in place of `recompute_strategy` and the settings that go with it.
            options: The fields of `EngineSettings`, and arguments for transformers' `from_pretrained()`.

        Raises:
            ValueError: As `KVBoost` does, and for two names or a damaged file of the model.
            TypeError: Neither `EngineSettings` nor the model has an option.
            OSError: There is no such model.

        Example:
            >>> from kvboost_hf.assets import EMBEDDED_MODEL_DIR
            >>> engine = KVBoost.from_pretrained(EMBEDDED_MODEL_DIR, chunk_size=64, device="cpu")
            >>> engine.generate("Anna lives in Oslo. Where does Anna live?", max_new_tokens=1).generated_tokens
            1
        """
        refuse("KVBoost", options)
        named = [model_name, *(options.pop(key, None) for key in ("model_name_or_path", "name"))]
        given = [name for name in named if name is not None]
        if len(given) > 1:
            raise ValueError(f"`model_name` must be given once, got {given}. Leave out all but one.")
        if "store" in options:
            raise ValueError(
                "`store` must be made for the model, which is not there yet. Call KVBoost(model, tokenizer, "
                "store=ChunkStore(model))."
            )
        settings = {key: options.pop(key) for key in SETTINGS & options.keys()}
        checked_settings(settings, policy)  # refuses now, not when the model is there
        try:
            model, tokenizer = load(given[0] if given else DEFAULT_MODEL, streaming_config, device, options)
        except TypeError as error:  # transformers hands what it does not know to the model
            if (unknown := next((key for key in options if f"keyword argument '{key}'" in str(error)), None)) is None:
                raise
            raise unknown_setting(unknown) from error
        return cls(model, tokenizer, strict=strict, assistant=assistant, policy=policy, **settings)

    # Answers

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        temperature: float = 1.0,
        do_sample: bool = False,
        **kwargs: Any,
    ) -> GenerationResult:
        """Generate the answer to a prompt.

        Args:
            prompt: A text, or messages as `chat` takes them. Where the tokenizer has a chat template, a text becomes
                the message of a user. It is sent as it is where there is no template, where it has special tokens (as
                after `tokenizer.apply_chat_template()`), and with `KVBoost(chat_template=False)`.
            max_new_tokens: Tokens of the answer, at most.
            mode: Which K/V may be reused. All modes give the answer of plain `generate()`, except for
                `CHUNK_KV_REUSE` with a `recompute_strategy`, and for all but `BASELINE` with `kv_cache_bits`.
            temperature: With `do_sample`, divides the logits.
            do_sample: Sample tokens; False takes the likeliest.
            kwargs: For `generate()` of transformers, such as `top_p`, `stop_strings` or `prefill_chunk_size`.

        Raises:
            ValueError: The prompt is empty, the mode is unknown, or the engine itself sets an argument.
        """
        began = time.perf_counter()
        options = call_options(max_new_tokens, temperature, do_sample, kwargs)
        mode, row = choice(GenerationMode, "mode", mode), self._prompts.encode(prompt)
        watch = Watch(len(row))
        ran = self._runner.run([row], mode, options, watch)
        [result] = self._runner.results([prompt], [row], mode, ran, began, watch)
        return result

    def chat(
        self,
        messages: Sequence[Message],
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        temperature: float = 1.0,
        do_sample: bool = False,
        **kwargs: Any,
    ) -> GenerationResult:
        """Generate the answer to a chat. The other methods take messages in place of a text, too.

        Args:
            messages: Dicts with `role` and `content`, as `tokenizer.apply_chat_template()` takes them. Special tokens
                in a content are read as such, whereas the server reads them as text. For tools, pass `generate` the
                text of `apply_chat_template(messages, tools=..., tokenize=False, add_generation_prompt=True)`.
            max_new_tokens: As in `generate`, like the arguments below.
            mode: Which K/V may be reused.
            temperature: With `do_sample`.
            do_sample: Sample tokens.
            kwargs: For `generate()` of transformers.

        Raises:
            ValueError: As `generate` does, and for a tokenizer without a chat template.

        Example:
            >>> from kvboost_hf.assets import load_embedded
            >>> engine = KVBoost(*load_embedded())
            >>> system = {"role": "system", "content": "You read documents and answer questions about them."}
            >>> user = {"role": "user", "content": "Anna lives in Oslo. She plays the piano. What does Anna play?"}
            >>> engine.chat([system, user]).output_text
            'Anna plays the piano.'
        """
        return self.generate(messages, max_new_tokens, mode, temperature, do_sample, **kwargs)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        temperature: float = 1.0,
        do_sample: bool = False,
        **kwargs: Any,
    ) -> Iterator[str]:
        """Generate the answer to a prompt, and yield its text as it comes.

        The arguments are those of `generate`. Closing the iterator ends the generation.

        Raises:
            ValueError: As `generate` does, before the iterator is returned.

        Example:
            >>> from kvboost_hf.assets import load_embedded
            >>> engine = KVBoost(*load_embedded())
            >>> prompt = "Anna lives in Oslo. Where does Anna live?"
            >>> "".join(engine.stream(prompt, 8)) == engine.generate(prompt, 8).output_text
            True
        """
        options = call_options(max_new_tokens, temperature, do_sample, kwargs)
        return self._runner.stream(self._prompts.encode(prompt), choice(GenerationMode, "mode", mode), options)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        do_sample: bool = False,
        **kwargs: Any,
    ) -> list[GenerationResult]:
        """Generate the answers to prompts in one batch; what several of them begin with is computed once.

        The prompts may be of any lengths. Greedy answers are those of `generate`, up to rounding. Of assistants
        only a `TreeDecoding` without heads is used.

        Args:
            prompts: Texts or chats, as `generate` takes them.
            max_new_tokens: Tokens of each answer, at most.
            temperature: With `do_sample`, divides the logits.
            do_sample: Sample tokens.
            kwargs: For `generate()` of transformers, without `stop_strings` and `stopping_criteria`.

        Returns:
            One result for each prompt.

        Raises:
            ValueError: As `generate` does.
        """
        began = time.perf_counter()
        rows = self._prompts.encode_all(prompts)
        options = call_options(max_new_tokens, temperature, do_sample, kwargs, rows=len(rows))
        if not rows:
            return []
        watch, mode = Watch(max(len(row) for row in rows)), GenerationMode.CHUNK_KV_REUSE
        with self._runner.lock:
            ran = self._runner.run(rows, mode, options, watch)
        return self._runner.results(prompts, rows, mode, ran, began, watch)

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        do_sample: bool = False,
        *,
        max_batch_size: int = 8,
        **kwargs: Any,
    ) -> list[GenerationResult]:
        """Generate the answers to prompts: in batches where they begin with the same chunks, else one by one.

        Args:
            prompts: Texts or chats, as `generate` takes them.
            max_new_tokens: Tokens of each answer, at most.
            temperature: With `do_sample`, divides the logits.
            do_sample: Sample tokens.
            max_batch_size: Prompts in a batch, at most.
            kwargs: As in `generate_batch`.

        Returns:
            One result for each prompt, in their order. Times are from the start of its batch.

        Raises:
            ValueError: As `generate` does, before anything is generated.
        """
        rows = self._prompts.encode_all(prompts)
        options = (max_new_tokens, temperature, do_sample)
        call_options(*options, kwargs, rows=len(rows))
        results: dict[int, GenerationResult] = {}
        for group in group_by_prefix([row.tolist() for row in rows], self.store.chunker.chunk_size, max_batch_size):
            if len(group) > 1:
                found = self.generate_batch([prompts[at] for at in group], *options, **kwargs)
            else:
                found = [
                    self.generate(
                        prompts[group[0]], max_new_tokens, temperature=temperature, do_sample=do_sample, **kwargs
                    )
                ]
            results |= zip(group, found, strict=True)
        return [results[at] for at in range(len(rows))]

    # The store

    def warm(
        self,
        text: Prompt,
        position_offset: int = 0,
        *,
        tools: Sequence[Any] | None = None,
        pin: bool = False,
    ) -> WarmResult:
        """Compute and store the K/V of a text that prompts will begin with.

        Args:
            text: The beginning of texts for `generate`; or the first messages of chats, such as a system message. The
                chat template is applied to it as to those.
            position_offset: Must be 0: stored K/V is moved when a prompt needs it elsewhere.
            tools: Tools of the chats, as `tokenizer.apply_chat_template()` takes them.
            pin: Never evict it.

        Raises:
            ValueError: The text is empty, the offset is not 0, or the chat template refuses the messages.
            StoreFullError: The text is to be pinned and does not fit into the store's budget.
        """
        if position_offset != 0:
            raise ValueError(
                f"`position_offset` must be 0, got {position_offset}: chunks are moved when they are needed. For "
                "texts that stand anywhere in prompts call engine.store.warm(documents=[text], tokenizer=tokenizer)."
            )
        with self._runner.lock:
            live = self.settings.live_config
            return warm(
                self.store, self.policy, self._prompts.encode_start(text, tools=tools), pin=pin, live_quant=live
            )

    def cache_stats(self) -> dict[str, Any]:
        """The figures of the store, as `ChunkStore.stats` returns them."""
        return self.store.stats()

    def reset_cache(self) -> None:
        """Remove all K/V of the model from all tiers. Counts in `cache_stats` go on."""
        with self._runner.lock:
            self._runner.reset()
            self.store.clear()

    # Checks and figures

    def verify_correctness(
        self, prompts: Sequence[Prompt] | int | None = None, max_new_tokens: int = 32
    ) -> CorrectnessReport:
        """Compare the answers of these settings with those of plain `generate()`, on new stores.

        Args:
            prompts: Texts or chats such as users would send, in the order in which they would; None for built-in ones.
                A number is that of tokens of each answer, as kvboost takes it.
            max_new_tokens: Tokens of each answer.

        Returns:
            The report. It is true if exact reuse is right, and if the codec and `live_quant` of these settings are
            within the thresholds. With a `recompute_strategy` it has a row for that, too.

        Raises:
            ValueError: There are no prompts, or the model has been attached.
        """
        if isinstance(prompts, int):
            max_new_tokens = prompts
        asked = CHECK_PROMPTS if prompts is None or isinstance(prompts, int) else prompts
        live = self.settings.live_config
        with self._runner.lock:
            return verify_correctness(
                self.model,
                [row.tolist() for row in self._prompts.encode_all(asked)],
                policies=[self.policy] if self.policy.mode == "blend" else [],
                live_quants=[] if live is None else [live],
                max_new_tokens=max_new_tokens,
                make_store=lambda model: ChunkStore(model, chunker=self.store.chunker, codec=self.store.codec),
            )

    def streaming_stats(self) -> StreamingStats | None:
        """Figures of streaming so far; None where no layer is streamed."""
        return streaming_stats(self.model)

    def speculative_stats(self) -> SpeculationStats | None:
        """Figures of drafts so far; None without an assistant."""
        return speculation_stats(self.assistant) if self.assistant is not None else None


InferenceEngine = KVBoost
"""`KVBoost`, by the name that kvboost has for the class."""
