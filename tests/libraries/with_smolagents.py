"""smolagents: agents that send all of their steps with each new one."""

from typing import Any

from recipes import real_model
from tests.libraries.prompts import QUESTIONS, Message, talk
from tests.libraries.scenario import Answers, Session, scenario

_TASK = "Which temple in Rome did the emperor Hadrian rebuild?"


@scenario("smolagents", "TransformersModel.generate()")
def generated(session: Session) -> Answers:
    engine = _engine(session)
    return talk(QUESTIONS[:4], lambda messages: engine.generate(_blocks(messages), stop_sequences=["Rome,"]).content)


@scenario("smolagents", "TransformersModel.generate_stream()")
def streamed(session: Session) -> Answers:
    engine = _engine(session)
    return talk(QUESTIONS[:4], lambda m: "".join(delta.content for delta in engine.generate_stream(_blocks(m))))


@scenario("smolagents", "CodeAgent")
def code_agent(session: Session) -> Answers:
    from smolagents import CodeAgent

    agent = CodeAgent(tools=[], model=_engine(session), max_steps=2, verbosity_level=0)
    return [str(agent.run(_TASK)), str(agent.run("And who built it first?", reset=False))]


@scenario("smolagents", "CodeAgent(stream_outputs=True)")
def streaming_agent(session: Session) -> Answers:
    from smolagents import CodeAgent

    agent = CodeAgent(tools=[], model=_engine(session), max_steps=2, verbosity_level=0, stream_outputs=True)
    return [str(agent.run(_TASK))]


@scenario("smolagents", "ToolCallingAgent")
def tool_agent(session: Session) -> Answers:
    from smolagents import ToolCallingAgent, tool

    @tool
    def look_up(name: str) -> str:
        """Looks up a building.

        Args:
            name: What it is called.
        """
        return f"{name} was rebuilt by Hadrian."

    agent = ToolCallingAgent(tools=[look_up], model=_engine(session), max_steps=2, verbosity_level=0)
    return [str(agent.run(_TASK)), str(agent.run("And who built it first?", reset=False))]


def _engine(session: Session) -> Any:
    """The library's model; it would load one of its own, and is given the session's."""
    from smolagents import TransformersModel

    engine = TransformersModel(str(real_model.FLOAT32), max_new_tokens=16, do_sample=False)
    engine.model = session.attach(session.model)
    return engine


def _blocks(messages: list[Message]) -> list[dict[str, Any]]:
    return [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in messages]
