"""Pipelines and other calls that bring no cache of their own."""

import contextlib
import gc
import inspect
import re
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BartConfig,
    BartForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    PreTrainedModel,
    StaticCache,
    TextIteratorStreamer,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, attach, check_model_compatibility, detach, last_cache
from kvboost_hf.assets import load_embedded
from tests.architectures import make_architecture
from tests.conftest import BOS, EOS, PAD, VOCAB, as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.cache import OF_GENERATE, attaching

BASE = random_ids(200, seed=1)


@pytest.fixture
def attached(llama: PreTrainedModel) -> PreTrainedModel:
    check_model_compatibility(llama)
    return attach(llama, ChunkStore(llama, chunk_size=32))


def report(model: PreTrainedModel) -> Any:
    cache = last_cache(model)
    assert cache is not None
    return cache.report


def test_later_calls_reuse(attached: PreTrainedModel) -> None:
    expected = make_model("llama").generate(**as_inputs(BASE), max_new_tokens=6)
    for reused in (0, 199):
        assert torch.equal(attached.generate(**as_inputs(BASE), max_new_tokens=6), expected)
        assert report(attached).reused_tokens == reused  # the tail that filled no chunk, too


@pytest.mark.parametrize(
    "mode",
    [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 50},
        pytest.param({"prefill_chunk_size": 17}, marks=pytest.mark.daily),  # the last piece has one token
        {"logits_to_keep": 4},
        {"num_return_sequences": 2},
        # Its forwards of another text have no report.
        pytest.param({"guidance_scale": 1.5}, marks=pytest.mark.daily),
        {"guidance_scale": 1.5, "policy": ReusePolicy(keep_logprobs=True)},
    ],
)
def test_modes(attached: PreTrainedModel, mode: dict[str, Any]) -> None:
    plain, mode = make_model("llama"), dict(mode)
    if policy := mode.pop("policy", None):
        attach(attached, ChunkStore(attached, chunk_size=32), policy)
    sample = {"do_sample": "num_return_sequences" in mode}
    for ids in (BASE, BASE, BASE[:, :120]):
        torch.manual_seed(0)
        expected = plain.generate(**as_inputs(ids), max_new_tokens=6, **mode, **sample)
        torch.manual_seed(0)
        assert torch.equal(attached.generate(**as_inputs(ids), max_new_tokens=6, **mode, **sample), expected)
    assert report(attached).prompt_tokens % 120 == 0  # of each row
    assert report(attached).reused_tokens >= 100


class _ReadsAll(UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """Guides as that of transformers, and reads the logits of all tokens of the negative prompt."""

    seen: Any = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        first = self.unconditional_context["first_pass"]
        logits = self.get_unconditional_logits(input_ids)
        self.seen = logits if first else self.seen
        return scores - logits[:, -1]


@pytest.mark.parametrize("keeps", [False, True])
def test_negative_prompts(attached: PreTrainedModel, keeps: bool) -> None:
    """The processor of `guidance_scale` asks for all logits of them, and reads the last ones."""
    if keeps:
        attach(attached, ChunkStore(attached, chunk_size=32), ReusePolicy(keep_logprobs=True))
    negative: Any = random_ids(90, seed=4)
    plain = make_model("llama")
    call = {"guidance_scale": 1.5, "max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True}
    expected = plain.generate(**as_inputs(BASE), **call, negative_prompt_ids=negative)
    gc.disable()  # what is not held any more is gone at once, and its tail is stored
    try:
        for _ in range(3):
            with counted(attached) as work:
                found = attached.generate(**as_inputs(BASE), **call, negative_prompt_ids=negative)
            assert torch.equal(found.sequences, expected.sequences)
            torch.testing.assert_close(found.scores, expected.scores, atol=2e-4, rtol=2e-4)
    finally:
        gc.enable()
    assert work.tokens == 2 * 6
    guides = [_ReadsAll(1.5, model, negative) for model in (attached, plain)]
    for guide in guides:
        guide.model.generate(**as_inputs(BASE), max_new_tokens=2, logits_processor=[guide])
    torch.testing.assert_close(guides[0].seen, guides[1].seen, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["mistral", "lfm2"])
def test_candidates_are_cropped_from_windows_and_states(name: str) -> None:
    """generate() asks the cache that it has made to remember them, before ours takes its place."""
    plain, model = make_architecture(name), make_architecture(name)
    check_model_compatibility(model)
    attach(model, ChunkStore(model, chunk_size=32))
    ids = BASE[:, :40].repeat(1, 3)
    for _ in range(2):
        found = model.generate(**as_inputs(ids), max_new_tokens=12, prompt_lookup_num_tokens=4)
        assert torch.equal(found, plain.generate(**as_inputs(ids), max_new_tokens=12))
    assert report(model).reused_tokens >= 96


def test_target_and_assistant_both_attached(attached: PreTrainedModel) -> None:
    assistant = attach(make_model("llama", seed=7))
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.assistant_confidence_threshold = 0.0
    plain = make_model("llama")
    for ids in (BASE, BASE, BASE[:, :150]):
        found = attached.generate(**as_inputs(ids), max_new_tokens=10, assistant_model=assistant)
        assert torch.equal(found, plain.generate(**as_inputs(ids), max_new_tokens=10))


def test_batches(attached: PreTrainedModel) -> None:
    plain = make_model("llama")
    for batch in (left_pad(BASE[:, :150], BASE[:, :70]), left_pad(BASE[:, :170], BASE[:, :90])):
        expected = plain.generate(**batch, max_new_tokens=6)
        assert torch.equal(attached.generate(**batch, max_new_tokens=6), expected)
    assert report(attached).reused_tokens >= 150


@torch.no_grad()
def test_a_cache_of_the_caller_stays_usable(attached: PreTrainedModel) -> None:
    """Somebody passes a DynamicCache of their own, and goes on using it."""
    plain = make_model("llama")
    theirs, stock = DynamicCache(config=attached.config), DynamicCache(config=attached.config)
    for model, cache in ((attached, theirs), (plain, stock)):
        model.generate(**as_inputs(BASE[:, :90]), past_key_values=cache, max_new_tokens=4)
    assert theirs.get_seq_length() == stock.get_seq_length()
    ids = random_ids(40, seed=2)
    for step in (lambda c: None, lambda c: c.crop(-7), lambda c: c.reorder_cache(torch.tensor([0]))):
        step(theirs)
        step(stock)
        found, expected = attached(ids, past_key_values=theirs).logits, plain(ids, past_key_values=stock).logits
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    # Nothing of it was stored under tokens that it does not belong to.
    for prompt in (BASE, torch.cat([BASE[:, :93], ids], dim=1)):
        assert torch.equal(
            attached.generate(**as_inputs(prompt), max_new_tokens=4),
            plain.generate(**as_inputs(prompt), max_new_tokens=4),
        )


def test_a_cache_passed_by_hand_wins(attached: PreTrainedModel) -> None:
    cache = ChunkReuseCache(attached, ChunkStore(attached, chunk_size=32))
    attached.generate(**as_inputs(BASE), max_new_tokens=2, past_key_values=cache)
    assert cache.report.prompt_tokens == 200
    assert last_cache(attached) is None


def test_detach(attached: PreTrainedModel) -> None:
    attached.generate(**as_inputs(BASE), max_new_tokens=2)
    detach(attached)
    assert last_cache(attached) is None
    with counted(attached) as work:
        attached.generate(**as_inputs(BASE), max_new_tokens=2)
    assert work.tokens == 201


def test_threads(attached: PreTrainedModel) -> None:
    prompts = [torch.cat([BASE[:, : 20 * i], random_ids(30, seed=i)], dim=1) for i in range(8)]
    expected = [make_model("llama").generate(**as_inputs(p), max_new_tokens=5) for p in prompts]
    wrong: list[int] = []

    def work(offset: int) -> None:
        for i in range(16):
            at = (i * 3 + offset) % 8
            if not torch.equal(attached.generate(**as_inputs(prompts[at]), max_new_tokens=5), expected[at]):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class TestPipeline:
    TEXT = "The lamp is red. The box is blue. Anna lives in Rome. She owns the lamp. " * 6

    @pytest.mark.parametrize("by_hand", [True, False])
    def test_text_generation(self, by_hand: bool) -> None:
        model, tokenizer = load_embedded()
        check_model_compatibility(model)
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        ask = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
        expected = pipe(self.TEXT, **ask)
        cache = ChunkReuseCache(model)
        if not by_hand:
            attach(model)
        kwargs = {"past_key_values": cache} if by_hand else {}
        assert pipe(self.TEXT, **ask, **kwargs) == expected
        with counted(model) as work:
            assert pipe(self.TEXT, **ask, **kwargs) == expected
        assert work.tokens <= 5


def test_a_growing_chat_loses_little_between_calls(attached: PreTrainedModel) -> None:
    """Each call has a cache of its own, so that the store alone carries the chat: at most 8 tokens a turn are lost."""
    plain = make_model("llama")
    history, seen = random_ids(54, seed=20), 0
    for turn in range(6):
        history = torch.cat([history, random_ids(40 + turn, seed=30 + turn)], dim=1)
        with counted(attached) as work:
            found = attached.generate(**as_inputs(history), max_new_tokens=11, min_new_tokens=11)
        assert torch.equal(found, plain.generate(**as_inputs(history), max_new_tokens=11, min_new_tokens=11))
        assert work.tokens - 10 <= history.shape[1] - seen + 8
        history, seen = found, found.shape[1] - 1


# Inside what people build on generate()


def chat(model: PreTrainedModel, turns: int, ask: Any) -> list[int]:
    """A growing text; returns the reused tokens of each turn."""
    plain, ids, reused = make_model("llama"), BASE[:, :30], []
    for turn in range(turns):
        found = ask(ids)
        assert torch.equal(found, plain.generate(**as_inputs(ids), max_new_tokens=20))
        reused.append(report(model).reused_tokens)
        ids = torch.cat([found, random_ids(9, seed=turn)], dim=1)
    return reused


def nothing_is_lost(reused: list[int]) -> bool:
    """Each turn's text is 29 tokens longer; the last token of an answer is never run through the model.

    Fewer than 8 tokens behind the last chunk are not stored.
    """
    whole = [0, *range(49, 49 + 7 * 29, 29)]
    return len(reused) == 8 and all(want - 8 < got <= want for got, want in zip(reused, whole, strict=True))


def in_a_thread(call: Any) -> Any:
    """Run a call in a thread that ends with it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_for_each_request(attached: PreTrainedModel) -> None:
    """As every web page that streams does it. `last_cache` tells of the last call of any thread."""

    def ask(ids: torch.Tensor) -> Any:
        return in_a_thread(lambda: attached.generate(**as_inputs(ids), max_new_tokens=20))

    assert nothing_is_lost(chat(attached, 8, ask))


def test_a_stream_read_by_another_thread(attached: PreTrainedModel) -> None:
    """The reader may begin the next request as soon as the last token is there."""
    _, tokenizer = load_embedded()

    def ask(ids: torch.Tensor) -> Any:
        found: list[Any] = []
        streamer = TextIteratorStreamer(tokenizer)

        def run() -> None:
            found.append(attached.generate(**as_inputs(ids), max_new_tokens=20, streamer=streamer))

        threading.Thread(target=run).start()
        assert list(streamer)
        while not found:
            time.sleep(0.001)
        return found[0]

    assert nothing_is_lost(chat(attached, 8, ask))


class Tokens(BaseStreamer):
    """Keeps what it is given; `at_end` is called when that is all."""

    def __init__(self, at_end: Callable[[], Any]) -> None:
        self.ids: list[int] = []
        self.at_end = at_end

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.at_end()


def test_the_next_request_may_come_at_the_end_of_the_stream(attached: PreTrainedModel) -> None:
    """Before generate() has returned: as a reader in another thread may make it."""
    found: list[Any] = []

    def go_on() -> None:
        prompt = torch.cat([torch.tensor([streamer.ids]), random_ids(9, seed=1)], dim=1)

        def ask() -> None:
            with counted(attached) as work:
                answer = attached.generate(**as_inputs(prompt), max_new_tokens=1)
            found.extend((prompt, answer, work.tokens))

        in_a_thread(ask)

    streamer = Tokens(go_on)
    attached.generate(**as_inputs(BASE[:, :45]), max_new_tokens=15, streamer=streamer)
    prompt, answer, tokens = found
    assert torch.equal(answer, make_model("llama").generate(**as_inputs(prompt), max_new_tokens=1))
    assert tokens == 10, "the last token of the answer, and the new ones"
    assert "end" not in vars(streamer), "the streamer was not left as it was"


class Slotted(Tokens):
    """Takes no attributes."""

    __slots__ = ("at_end", "ids")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "end":
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", [Tokens, Slotted])
def test_a_streamer_serves_many_calls(attached: PreTrainedModel, kind: type[Tokens]) -> None:
    """Also after one that fails before its end, and with an `end` of its own."""
    ends: list[int] = []
    streamer = kind(lambda: ends.append(1))
    for _ in range(2):
        attached.generate(**as_inputs(BASE[:, :45]), max_new_tokens=3, streamer=streamer)
    with pytest.raises(RuntimeError, match="enough"):
        attached.generate(
            **as_inputs(BASE[:, :45]), max_new_tokens=3, streamer=streamer, logits_processor=[_Fails(46)]
        )
    assert len(ends) == 2
    if kind is Tokens:
        streamer.end = own = lambda: ends.append(2)
        attached.generate(**as_inputs(BASE[:, :45]), max_new_tokens=3, streamer=streamer)
        assert vars(streamer)["end"] is own
    else:
        attached.generate(**as_inputs(BASE[:, :45]), max_new_tokens=3, streamer=streamer)
    assert len(ends) == 3


def test_the_end_of_a_call_stores_its_last_tokens(attached: PreTrainedModel) -> None:
    store = ChunkStore(attached, chunk_size=32)
    attach(attached, store)
    attached.generate(**as_inputs(BASE[:, :45]), max_new_tokens=6)
    assert store.stats()["tokens"] == 50
    with counted(attached) as work:
        attached.generate(**as_inputs(BASE[:, :45]), max_new_tokens=1)
    assert work.tokens == 1


def test_a_call_that_fails_leaves_its_chunks_and_no_more(attached: PreTrainedModel) -> None:
    store = ChunkStore(attached, chunk_size=32)
    attach(attached, store)

    def fail(*_: Any) -> None:
        if store.stats()["tokens"] >= 64:
            raise RuntimeError("out of luck")

    handle = attached.model.layers[1].register_forward_pre_hook(fail)
    fail.leaves_kv_alone = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="out of luck"):
        attached.generate(**as_inputs(BASE), max_new_tokens=60, prefill_chunk_size=32)
    handle.remove()
    gc.collect()
    assert store.check_integrity().wrong == 0
    assert torch.equal(
        attached.generate(**as_inputs(BASE), max_new_tokens=6),
        make_model("llama").generate(**as_inputs(BASE), max_new_tokens=6),
    )


def test_a_configuration_collected_in_the_middle_of_our_work(attached: PreTrainedModel) -> None:
    """What stores the last tokens may be called at any time by the collector of garbage, while locks are held."""
    plain = make_model("llama")
    done: list[torch.Tensor] = []

    def ask(seed: int) -> None:
        for turn in range(4):
            ids = random_ids(70 + turn, seed=seed)
            with contextlib.suppress(RuntimeError):
                attached.generate(**as_inputs(ids), max_new_tokens=3, logits_processor=[_Fails(ids.shape[1] + 1)])
            done.append(attached.generate(**as_inputs(ids), max_new_tokens=3))
            assert torch.equal(done[-1], plain.generate(**as_inputs(ids), max_new_tokens=3))

    before = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
            assert not thread.is_alive()
    finally:
        gc.set_threshold(*before)
    assert len(done) == 12


class _Fails(LogitsProcessor):
    def __init__(self, at: int) -> None:
        self.at, self.itself = at, self  # a circle, which only the collector takes apart

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] >= self.at:
            raise RuntimeError("enough")
        return scores


def test_detach_stores_what_is_left(attached: PreTrainedModel) -> None:
    store = ChunkStore(attached, chunk_size=32)
    attach(attached, store)
    out = attached(BASE[:, :40], logits_to_keep=1)
    attached(BASE[:, 40:60], past_key_values=out.past_key_values, logits_to_keep=1)
    detach(attached)
    assert store.stats()["tokens"] == 60


@pytest.mark.parametrize(
    "options",
    [
        {"stop_strings": ["never said"]},
        {"token_healing": False},
        {"synced_gpus": False},
        {"assistant_early_exit": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_that_generate_passes_on(options: dict[str, Any]) -> None:
    model, tokenizer = load_embedded()
    plain, _ = load_embedded()
    attach(model, ChunkStore(model, chunk_size=32))
    given = tokenizer("The lamp is red. " * 30, return_tensors="pt")
    for _ in range(2):
        found = model.generate(**given, tokenizer=tokenizer, max_new_tokens=6, **options)
        assert torch.equal(found, plain.generate(**given, tokenizer=tokenizer, max_new_tokens=6, **options))
    assert report(model).reused_tokens == given["input_ids"].shape[1] - 1


def test_what_generate_passes_on_is_known() -> None:
    """Every release may add to what it has for itself and lets through to forwards."""
    source = inspect.getsource(GenerationMixin._extract_generation_mode_kwargs)
    own = set(re.findall(r'^ +"(\w+)": ', source, re.MULTILINE)) | set(
        re.findall(r'generation_mode_kwargs\["(\w+)"\]', source)
    )
    assert {"tokenizer", "assistant_model", "synced_gpus"} <= own
    assert own <= OF_GENERATE


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "mistral", "gemma2"])
def test_a_static_cache(name: str) -> None:
    plain, model = make_model(name), make_model(name)
    check_model_compatibility(model)
    attach(model, ChunkStore(model, chunk_size=32))
    options = {"max_new_tokens": 6, "cache_implementation": "static"}
    longer = torch.cat([BASE, random_ids(30, seed=3)], dim=1)
    for ids, reused in ((BASE, 0), (BASE, 199), (longer, 200), (BASE[:, :77], 76), (random_ids(50, seed=9), 0)):
        assert torch.equal(model.generate(**as_inputs(ids), **options), plain.generate(**as_inputs(ids), **options))
        assert report(model).reused_tokens == reused
        assert report(model).bypass_reason is None
    batch = left_pad(BASE[:, :90], BASE[:, :60])
    assert torch.equal(model.generate(**batch, **options), plain.generate(**batch, **options))
    # Calls of both kinds share a store.
    assert torch.equal(
        model.generate(**as_inputs(longer), max_new_tokens=6), plain.generate(**as_inputs(longer), max_new_tokens=6)
    )
    assert report(model).reused_tokens >= 224


def test_a_call_that_is_not_served_says_why(attached: PreTrainedModel) -> None:
    """Its report is not that of the call before it."""
    plain = make_model("llama")

    def why(**options: Any) -> str:
        attached.generate(**as_inputs(BASE), max_new_tokens=3)
        assert report(attached).bypass_reason is None
        found = attached.generate(**as_inputs(BASE), max_new_tokens=3, **options)
        assert torch.equal(found, plain.generate(**as_inputs(BASE), max_new_tokens=3))
        assert (report(attached).reused_tokens, report(attached).forwarded_tokens) == (0, 200)
        return str(report(attached).bypass_reason)

    assert "StaticCache" in why(past_key_values=StaticCache(attached.config, max_cache_len=300))
    offloaded = DynamicCache()
    offloaded.offloading = True
    assert attaching._refusal(attached, offloaded, {}) == "generate() was told to offload its cache"
    assert attaching._refusal(attached, DynamicCache(), {}) is None
    with mock.patch.object(attached.config, "use_cache", False):
        assert attaching._refusal(attached, None, {}) == "use_cache is False"
    assert attaching._refusal(attached, None, {"logits_to_keep": 1}) is None
    quantized = attach(make_model("llama"), live_quant="int8")
    quantized.generate(**as_inputs(BASE), max_new_tokens=3, cache_implementation="static")
    assert str(report(quantized).bypass_reason).startswith("`live_quant` has buffers that grow, and")
    mistral = attach(make_model("mistral"))
    stock = StaticCache(mistral.config, max_cache_len=300)
    mistral(input_ids=BASE, past_key_values=stock, logits_to_keep=1)
    assert "whose layers all have a window" in str(report(mistral).bypass_reason)
    handle = attached.model.layers[0].register_forward_hook(
        lambda module, args, kwargs, output: None, with_kwargs=True
    )
    attached.generate(**as_inputs(BASE), max_new_tokens=3)
    assert "is given the cache" in str(report(attached).bypass_reason)
    handle.remove()


@torch.no_grad()
def test_forwards_that_cannot_be_served_say_why(attached: PreTrainedModel) -> None:
    embeds = attached.get_input_embeddings()(BASE)
    uncached = {"max_new_tokens": 3, "use_cache": False}  # each forward has the whole text
    padded, whole = left_pad(BASE[:, :150], BASE[:, :50]), as_inputs(torch.cat([BASE[:, :100]] * 2, dim=1))
    fixed: dict[str, Any] = {"config": attached.config, "max_cache_len": 160}

    class Own(DynamicCache):
        pass

    for call, reason in (
        (lambda: attached.generate(inputs_embeds=embeds, max_new_tokens=2), "no input_ids were passed"),
        (lambda: attached.generate(**as_inputs(BASE), **uncached), "use_cache is False"),
        (lambda: attached.generate(**as_inputs(BASE), **uncached, guidance_scale=1.5), "use_cache is False"),
        (lambda: attached.generate(**padded, **uncached), "use_cache is False"),
        (lambda: attached.generate(**padded, cache=Own(), prefill_chunk_size=64, max_new_tokens=2), "given a Own"),
        (lambda: attached.generate(**whole, cache=Own(), prompt_lookup_num_tokens=3, max_new_tokens=2), "given a Own"),
        (lambda: attached.generate(**padded, cache=StaticCache(**fixed), max_new_tokens=2), "given a StaticCache"),
        (lambda: attached(**padded), "the logits of all tokens are wanted"),
        (lambda: attached(BASE), "the logits of all tokens are wanted"),
        (lambda: attached(BASE, logits_to_keep=1, use_cache=False), "use_cache is False"),
    ):
        for _ in range(2):
            attached.generate(**as_inputs(BASE), max_new_tokens=2)
        assert report(attached).reused_tokens == 199
        for _ in range(2):
            call()
            assert reason in str(report(attached).bypass_reason)
            assert report(attached).reused_tokens == 0
            assert report(attached).prompt_tokens == report(attached).forwarded_tokens == 200


@torch.no_grad()
def test_cross_attention_keeps_the_cache_that_its_model_makes() -> None:
    """Of two parts, the second one of which is for what `encoder_hidden_states` give."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=VOCAB, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, init_std=0.3,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    model, states = BartForCausalLM(config).eval(), torch.randn(1, 20, 32)
    expected = model(BASE, encoder_hidden_states=states, use_cache=False).logits[:, -1:]
    attach(model, ChunkStore(model, chunk_size=32))
    for _ in range(2):
        out = model(BASE, encoder_hidden_states=states, logits_to_keep=1)
        torch.testing.assert_close(out.logits, expected, atol=2e-4, rtol=2e-4)
        assert "`encoder_hidden_states` was passed" in str(report(model).bypass_reason)
    again = model(
        BASE[:, -1:], encoder_hidden_states=states, past_key_values=out.past_key_values, logits_to_keep=1
    ).logits
    whole = torch.cat([BASE, BASE[:, -1:]], dim=1)
    expected = model(whole, encoder_hidden_states=states, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(again, expected, atol=2e-4, rtol=2e-4)
    expected = model(BASE, use_cache=False).logits[:, -1:]
    theirs = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    found = model(BASE, past_key_values=theirs, logits_to_keep=1).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert "EncoderDecoderCache" in str(report(model).bypass_reason)


def test_a_cache_that_the_forward_puts_into_a_pair() -> None:
    """GPT-2 with cross-attention returns it as one of two, and generate() passes that on."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True, initializer_range=0.3,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    model, states = GPT2LMHeadModel(config).eval(), {"encoder_hidden_states": torch.randn(1, 20, 32)}
    expected = [model.generate(**as_inputs(BASE), max_new_tokens=6, **given) for given in ({}, states)]
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    for given, plain in zip(({}, states, {}), (*expected, expected[0]), strict=True):
        assert torch.equal(model.generate(**as_inputs(BASE), max_new_tokens=6, cache=cache, **given), plain)
        assert ("`encoder_hidden_states` was passed" in str(cache.report.bypass_reason)) is bool(given)
    assert cache.report.reused_tokens == 199
    attach(model, ChunkStore(model, chunk_size=32))
    for given in ({}, {}):
        assert torch.equal(model.generate(**as_inputs(BASE), max_new_tokens=6, **given), expected[0])
    assert report(model).reused_tokens == 199


@pytest.mark.parametrize("name", ["minimax", "xlstm"])
def test_a_model_with_a_cache_class_of_its_own(name: str) -> None:
    model = attach(make_architecture(name))
    model.generate(**as_inputs(BASE[:, :60]), max_new_tokens=3)
    assert report(model).bypass_reason == "it keeps its K/V in a cache class of its own"
    assert report(model).prompt_tokens == report(model).forwarded_tokens == 60
    cache = ChunkReuseCache(model)
    model.generate(**as_inputs(BASE[:, :60]), max_new_tokens=3, cache=cache, prefill_chunk_size=40)
    assert cache.report.prompt_tokens == cache.report.forwarded_tokens == 60


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_generate_batch_says_why(attached: PreTrainedModel) -> None:
    attached.generate(**as_inputs(BASE), max_new_tokens=3)
    attached.generate(**as_inputs(BASE), max_new_tokens=3)
    assert report(attached).reused_tokens == 199
    config = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=EOS, pad_token_id=0)
    pages = ContinuousBatchingConfig(num_blocks=32, use_cuda_graph=False)  # else they take what memory is free
    done = attached.generate_batch([BASE[0].tolist()], config, pages, progress_bar=False)
    assert len(next(iter(done.values())).generated_tokens) == 3
    assert report(attached).bypass_reason == "generate_batch() keeps K/V in pages of its own"


@torch.no_grad()
def test_scoring_by_bare_calls(attached: PreTrainedModel) -> None:
    """Choices after one question, as evaluation scripts score them."""
    plain = make_model("llama")
    question, work = BASE[:, :120], []
    for seed in range(5):
        ids = torch.cat([question, random_ids(7, seed=seed)], dim=1)
        with counted(attached) as counts:
            found = attached(ids, logits_to_keep=8).logits
        torch.testing.assert_close(found, plain(ids, logits_to_keep=8).logits, atol=2e-4, rtol=2e-4)
        work.append(counts.tokens)
    assert work == [127, 8, 8, 8, 8]
    attached(question, use_cache=False, logits_to_keep=1)
    assert attached(question, logits_to_keep=1, use_cache=False).past_key_values is None
    whole = attached(question).logits  # all logits: nothing can be left out
    torch.testing.assert_close(whole, plain(question).logits, atol=2e-4, rtol=2e-4)


def test_adapters_switched_between_turns() -> None:
    model = make_model("llama")
    wrapper = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False), "one")
    wrapper.add_adapter("two", LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    wrapper.eval()
    check_model_compatibility(model)
    attach(wrapper, ChunkStore(wrapper, chunk_size=32))  # type: ignore[arg-type]
    found = {}
    for turn, name in enumerate(["one", "two"] * 3):
        wrapper.set_adapter(name)
        found[turn] = wrapper.generate(**as_inputs(BASE[:, :75]), max_new_tokens=4)
        last = last_cache(wrapper)  # type: ignore[arg-type]
        assert last is not None
        assert last.report.reused_tokens == (74 if turn > 1 else 0)
    detach(wrapper)  # type: ignore[arg-type]
    for turn, name in enumerate(["one", "two"]):
        wrapper.set_adapter(name)
        assert torch.equal(found[turn], wrapper.generate(**as_inputs(BASE[:, :75]), max_new_tokens=4))
        assert torch.equal(found[turn], found[turn + 4])


@pytest.mark.usefixtures("any_peft")
def test_adapters_of_transformers_are_left_in_training_mode() -> None:
    """`model.add_adapter()` does not call `eval()` on what it adds, which is the same in both modes."""
    model = make_model("llama")
    model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    assert any(module.training for module in model.modules())
    check_model_compatibility(model)
    attach(model, ChunkStore(model, chunk_size=32))
    expected = model.generate(**as_inputs(BASE), max_new_tokens=4)
    assert torch.equal(model.generate(**as_inputs(BASE), max_new_tokens=4), expected)
    assert report(model).reused_tokens == 199


@pytest.mark.usefixtures("any_peft")
def test_dropout_in_training_mode_is_seen() -> None:
    model = make_model("llama")
    model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.5))
    attach(model, ChunkStore(model, chunk_size=32))
    model.generate(**as_inputs(BASE), max_new_tokens=4)
    assert "training mode" in str(report(model).bypass_reason)


@pytest.mark.slow
def test_a_compiled_forward_is_compiled_for_as_many_shapes_as_without() -> None:
    graphs: dict[bool, list[int]] = {}
    for ours in (False, True):
        torch._dynamo.reset()
        model, counts = make_model("llama"), list[int]()
        if ours:
            check_model_compatibility(model)
            attach(model, ChunkStore(model, chunk_size=32))

        def note(graph: Any, inputs: Any, counts: list[int] = counts) -> Any:
            counts.append(1)
            return graph.forward

        model.forward = torch.compile(model.forward, backend=note)
        ids, graphs[ours] = BASE[:, :60], []
        for turn in range(4):
            found = model.generate(**as_inputs(ids), max_new_tokens=8)
            graphs[ours].append(len(counts))
            ids = torch.cat([found, random_ids(23 + turn, seed=turn)], dim=1)
    torch._dynamo.reset()
    assert graphs[True][-1] <= graphs[False][-1]
    assert graphs[True][2:] == [graphs[True][-1]] * 2  # none for later turns
