"""Paths through transformers itself."""

from threading import Thread
from typing import Any

import torch
from transformers import TextIteratorStreamer, pipeline

from tests.libraries.prompts import ABOUT_DOCUMENT, DOCUMENT, GREEDY, PAGED, QUESTIONS, Message, talk
from tests.libraries.scenario import Answers, Session, scenario


def _generated(session: Session, **options: Any) -> Any:
    def answer(messages: list[Message]) -> str:
        inputs = session.chat(messages)
        return session.new_text(session.model.generate(**inputs, **{**GREEDY, **options}), inputs)

    return answer


@scenario("transformers", "generate()")
def plain_chat(session: Session) -> Answers:
    session.attach(session.model)
    return talk(QUESTIONS, _generated(session))


@scenario("transformers", "TextIteratorStreamer, a thread for each request")
def streamed_in_threads(session: Session) -> Answers:
    session.attach(session.model)

    def answer(messages: list[Message]) -> str:
        streamer = TextIteratorStreamer(session.tokenizer, skip_prompt=True, skip_special_tokens=True)
        options = {**session.chat(messages), **GREEDY, "streamer": streamer}
        thread = Thread(target=session.model.generate, kwargs=options)  # type: ignore[arg-type]
        thread.start()
        text = "".join(streamer)
        thread.join()
        return text

    return talk(QUESTIONS, answer)


@scenario("transformers", "pipeline, chat messages")
def piped_chat(session: Session) -> Answers:
    pipe = pipeline("text-generation", model=session.attach(session.model), tokenizer=session.tokenizer)
    return talk(QUESTIONS[:4], lambda m: pipe(m, **GREEDY)[0]["generated_text"][-1]["content"])


@scenario("transformers", "pipeline, stop_sequence=")
def piped_with_stop(session: Session) -> Answers:
    pipe = pipeline("text-generation", model=session.attach(session.model), tokenizer=session.tokenizer)
    prompts = ABOUT_DOCUMENT
    return [pipe(p, stop_sequence=" dome", return_full_text=False, **GREEDY)[0]["generated_text"] for p in prompts]


@scenario("transformers", "pipeline, a list with batch_size=2", probe=80)
def piped_in_batches(session: Session) -> Answers:
    session.tokenizer.padding_side = "left"
    pipe = pipeline("text-generation", model=session.attach(session.model), tokenizer=session.tokenizer)
    prompts = [*ABOUT_DOCUMENT, *ABOUT_DOCUMENT]
    return [row[0]["generated_text"] for row in pipe(prompts, batch_size=2, return_full_text=False, **GREEDY)]


@scenario("transformers", "generate(stop_strings=)")
def stopped_by_strings(session: Session) -> Answers:
    session.attach(session.model)
    return talk(QUESTIONS[:4], _generated(session, stop_strings=["."], tokenizer=session.tokenizer))


@scenario("transformers", "generate(token_healing=True)")
def healed(session: Session) -> Answers:
    session.attach(session.model)
    answers = []
    for ending in ("The dome is the larg", "The link is <a href=http:", "The emperor Had"):
        inputs = session.text(DOCUMENT * 2 + ending)
        output = session.model.generate(**inputs, **GREEDY, token_healing=True, tokenizer=session.tokenizer)
        answers.append(output[0].tolist())
    return answers


@scenario("transformers", "generate(assistant_early_exit=)")
def early_exit(session: Session) -> Answers:
    session.attach(session.model)
    return talk(QUESTIONS[:4], _generated(session, assistant_early_exit=8))


@scenario("transformers", "generate(prompt_lookup_num_tokens=)")
def looked_up(session: Session) -> Answers:
    session.attach(session.model)
    return [_answered(session, prompt, prompt_lookup_num_tokens=4) for prompt in ABOUT_DOCUMENT]


@scenario("transformers", 'generate(cache_implementation="static")')
def static(session: Session) -> Answers:
    session.attach(session.model)
    return talk(QUESTIONS[:4], _generated(session, cache_implementation="static"))


@scenario(
    "transformers",
    'generate(cache_implementation="quantized")',
    known="The call asks for K/V that is rounded; `attach(model, live_quant=...)` holds codes that are reused",
)
def quantized(session: Session) -> Answers:
    session.attach(session.model)
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "nbits": 4}}
    return talk(QUESTIONS[:2], _generated(session, **options))


@scenario("transformers", "generate(prefill_chunk_size=)")
def in_pieces(session: Session) -> Answers:
    session.attach(session.model)
    return talk(QUESTIONS[:4], _generated(session, prefill_chunk_size=32))


@scenario("transformers", "generate(num_beams=3)")
def beams(session: Session) -> Answers:
    session.attach(session.model)
    return talk(QUESTIONS[:4], _generated(session, num_beams=3))


@scenario("transformers", "generate(output_scores=True, output_logits=True)")
def with_scores(session: Session) -> Answers:
    session.attach(session.model)
    options = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}

    def answer(messages: list[Message]) -> str:
        inputs = session.chat(messages)
        return session.new_text(session.model.generate(**inputs, **GREEDY, **options).sequences, inputs)

    return talk(QUESTIONS[:4], answer)


@scenario("transformers", "generate(past_key_values=DynamicCache()), kept through a chat")
def own_cache(session: Session) -> Answers:
    from transformers import DynamicCache

    session.attach(session.model)
    cache = DynamicCache(config=session.model.config)
    return talk(QUESTIONS[:4], _generated(session, past_key_values=cache))


@scenario("transformers", "generate_batch() (paged attention)", known=PAGED)
def paged(session: Session) -> Answers:
    from transformers import GenerationConfig

    session.attach(session.model)
    config = GenerationConfig(**GREEDY, eos_token_id=2, pad_token_id=2, use_cuda_graph=False)
    inputs = [session.text(prompt)["input_ids"][0].tolist() for prompt in ABOUT_DOCUMENT]
    done = session.model.generate_batch(inputs, generation_config=config, progress_bar=False)
    return [result.generated_tokens for _, result in sorted(done.items(), key=lambda item: item[0])]


@scenario("transformers", "model(ids, logits_to_keep=k) under no_grad: scores of choices")
def scored(session: Session) -> Answers:
    session.attach(session.model)
    start = session.text(DOCUMENT * 2 + "Question: Who rebuilt it? Answer: ")["input_ids"]
    scores = []
    with torch.no_grad():
        for choice in ("the emperor Hadrian", "a concrete dome", "nobody knows that", "the emperor Nero"):
            ids = session.text(choice)["input_ids"]
            k = ids.shape[1]
            logits = session.model(torch.cat([start, ids], 1), logits_to_keep=k + 1).logits[0, :-1]
            scores.append(round(float(logits.log_softmax(-1).gather(1, ids[0, :, None]).sum()), 3))
    return scores


@scenario("transformers", "torch.compile(model.forward)", counts="forward")
def compiled(session: Session) -> Answers:
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    del session.model.model.layers[3:]  # compiling all thirty takes minutes
    session.model.config.num_hidden_layers = 3
    session.attach(session.model)
    session.model.forward = torch.compile(session.model.forward, backend=count, dynamic=True)
    answers = talk(QUESTIONS[:4], _generated(session))
    session.notes.append(f"{len(graphs)} graphs")
    return answers


def _answered(session: Session, prompt: str, **options: Any) -> Any:
    return session.model.generate(**session.text(prompt), **{**GREEDY, **options})[0].tolist()
