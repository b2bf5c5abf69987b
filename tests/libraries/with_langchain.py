"""LangChain over a pipeline of transformers."""

from typing import Any

from transformers import pipeline

from recipes import real_model
from tests.libraries.prompts import ABOUT_DOCUMENT, GREEDY, QUESTIONS, Message, talk
from tests.libraries.scenario import Answers, Session, scenario


@scenario("langchain-huggingface", "HuggingFacePipeline.invoke()")
def invoked(session: Session) -> Answers:
    llm = _llm(session)
    return [llm.invoke(prompt) for prompt in ABOUT_DOCUMENT]


@scenario("langchain-huggingface", "HuggingFacePipeline.invoke(), stop= bound")
def invoked_with_stop(session: Session) -> Answers:
    llm = _llm(session).bind(stop=["concrete"])
    return [llm.invoke(prompt) for prompt in ABOUT_DOCUMENT]


@scenario("langchain-huggingface", "HuggingFacePipeline.batch()")
def in_batches(session: Session) -> Answers:
    return [*_llm(session).batch(ABOUT_DOCUMENT)]


@scenario("langchain-huggingface", "HuggingFacePipeline.stream()")
def streamed(session: Session) -> Answers:
    llm = _llm(session)
    return ["".join(llm.stream(prompt)) for prompt in ABOUT_DOCUMENT]


@scenario("langchain-huggingface", "ChatHuggingFace.invoke()")
def chatted(session: Session) -> Answers:
    chat = _chat(session)
    return talk(QUESTIONS[:4], lambda messages: str(chat.invoke(_said(messages)).content))


@scenario("langchain-huggingface", "ChatHuggingFace.stream()")
def chat_streamed(session: Session) -> Answers:
    chat = _chat(session)
    return talk(QUESTIONS[:4], lambda messages: "".join(str(part.content) for part in chat.stream(_said(messages))))


def _llm(session: Session) -> Any:
    from langchain_huggingface import HuggingFacePipeline

    pipe = pipeline(
        "text-generation",
        model=session.attach(session.model),
        tokenizer=session.tokenizer,
        return_full_text=False,
        **GREEDY,
    )
    return HuggingFacePipeline(pipeline=pipe, pipeline_kwargs={"return_full_text": False, **GREEDY})


def _chat(session: Session) -> Any:
    from langchain_huggingface import ChatHuggingFace

    return ChatHuggingFace(llm=_llm(session), model_id=str(real_model.FLOAT32), tokenizer=session.tokenizer)


def _said(messages: list[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]
