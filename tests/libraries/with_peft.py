"""PEFT: adapters that come and go between the turns of a chat."""

from typing import Any

import torch

from tests.libraries.prompts import GREEDY, QUESTIONS, Message, talk
from tests.libraries.scenario import Answers, Session, scenario


@scenario("peft", "attach(model), then LoRA adapters switched by set_adapter() between turns")
def switched(session: Session) -> Answers:
    session.attach(session.model)
    return _switching(session, _with_adapters(session.model))


@scenario("peft", "attach(peft_model), adapters switched")
def wrapped(session: Session) -> Answers:
    tuned = session.attach(_with_adapters(session.model))
    return _switching(session, tuned)


@scenario("peft", "model.add_adapter() of transformers, disable_adapters() and enable_adapters()")
def added(session: Session) -> Answers:
    from peft import LoraConfig

    model = session.attach(session.model)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), adapter_name="one")
    _fill(model)
    answers = []
    for turn, change in enumerate((model.enable_adapters, model.disable_adapters) * 2):
        change()
        with session.watch.under(f"adapter {turn % 2}"):
            answers += talk(QUESTIONS[:2], _by(session, model))
    return answers


def _with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), adapter_name="one")
    tuned.add_adapter("two", LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    _fill(tuned)
    return tuned.eval()


def _fill(model: Any) -> None:
    """New adapters are all zeros in one half, and change nothing."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=random) * 0.02)


def _switching(session: Session, tuned: Any) -> Answers:
    answers = []
    for name in ("one", "two", "one", "two"):
        tuned.set_adapter(name)
        with session.watch.under(name):
            answers += talk(QUESTIONS[:2], _by(session, tuned))
    with tuned.disable_adapter():
        answers += talk(QUESTIONS[:2], _by(session, tuned))
    return answers


def _by(session: Session, model: Any) -> Any:
    def answer(messages: list[Message]) -> str:
        inputs = session.chat(messages)
        return session.new_text(model.generate(**inputs, **GREEDY), inputs)

    return answer
