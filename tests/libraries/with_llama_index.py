"""LlamaIndex over a loaded model."""

from typing import Any

from tests.libraries.prompts import ABOUT_DOCUMENT, QUESTIONS, Message, talk
from tests.libraries.scenario import Answers, Session, scenario

_PACKAGE, _MODULE = "llama-index-llms-huggingface", "llama_index.llms.huggingface"


@scenario(_PACKAGE, "HuggingFaceLLM.complete()", module=_MODULE)
def completed(session: Session) -> Answers:
    llm = _llm(session)
    return [llm.complete(prompt).text for prompt in ABOUT_DOCUMENT]


@scenario(_PACKAGE, "HuggingFaceLLM.chat()", module=_MODULE)
def chatted(session: Session) -> Answers:
    llm = _llm(session)
    return talk(QUESTIONS[:4], lambda messages: str(llm.chat(_said(messages)).message.content))


@scenario(_PACKAGE, "HuggingFaceLLM.stream_chat()", module=_MODULE)
def chat_streamed(session: Session) -> Answers:
    llm = _llm(session)
    return talk(QUESTIONS[:4], lambda messages: "".join(part.delta for part in llm.stream_chat(_said(messages))))


def _llm(session: Session) -> Any:
    from llama_index.llms.huggingface import HuggingFaceLLM

    return HuggingFaceLLM(
        model=session.attach(session.model),
        tokenizer=session.tokenizer,
        context_window=2048,
        max_new_tokens=12,
        generate_kwargs={"do_sample": False},
    )


def _said(messages: list[Message]) -> list[Any]:
    from llama_index.core.llms import ChatMessage

    return [ChatMessage(role=message["role"], content=message["content"]) for message in messages]
