"""kvpress: K/V of a prompt is thinned out while the prompt is computed."""

from collections.abc import Callable
from typing import Any

from transformers import pipeline

from kvboost_hf.compat import cache_in
from tests.libraries.prompts import DOCUMENT, GREEDY
from tests.libraries.scenario import Answers, Session, scenario

_CONTEXT = DOCUMENT * 4
_RATIO = 0.5
_PRESSES: dict[str, Callable[[Any], Any]] = {
    "KnormPress": lambda kvpress: kvpress.KnormPress(_RATIO),
    "SnapKVPress": lambda kvpress: kvpress.SnapKVPress(_RATIO, window_size=16),
    "RandomPress": lambda kvpress: kvpress.RandomPress(_RATIO, seed=0),
    "ExpectedAttentionPress": lambda kvpress: kvpress.ExpectedAttentionPress(_RATIO),
    "StreamingLLMPress": lambda kvpress: kvpress.StreamingLLMPress(_RATIO),
    "TOVAPress": lambda kvpress: kvpress.TOVAPress(_RATIO),
    "AdaKVPress(KnormPress)": lambda kvpress: kvpress.AdaKVPress(kvpress.KnormPress(_RATIO)),
    "CriticalAdaKVPress(KnormPress)": lambda kvpress: kvpress.CriticalAdaKVPress(kvpress.KnormPress(_RATIO)),
    "DMSPress(KnormPress)": lambda kvpress: kvpress.DMSPress(
        kvpress.KnormPress(), threshold=-20.0, sliding_window_size=16
    ),
}


def _fitted(press: Any) -> Any:
    """kvpress 0.5.5 is made for transformers before 5.3, whose attention layers were told `cache_position`, and called
    the cache `past_key_values`.
    """
    hook = press.forward_hook

    def forward_hook(module: Any, given: Any, kwargs: dict[str, Any], output: Any) -> Any:
        old = {"cache_position": kwargs["position_ids"][0], "past_key_values": cache_in(kwargs)}
        return hook(module, given, {**kwargs, **old}, output)

    press.forward_hook = forward_hook
    return press


# These leave a mask on the attention layers, which the next whole prompt takes away.
_LEAVE_A_MASK = ("AdaKVPress(KnormPress)", "CriticalAdaKVPress(KnormPress)", "DMSPress(KnormPress)")
_COMPUTED_WHOLE = (
    "The first ordinary call after the press is computed whole, which takes away the mask that it has left"
)


def _add(name: str, make: Callable[[Any], Any]) -> None:
    known = _COMPUTED_WHOLE if name in _LEAVE_A_MASK else ""

    @scenario("kvpress", f"with {name}(model): generate(), between ordinary calls", known=known)
    def pressed(session: Session) -> Answers:
        import kvpress

        session.attach(session.model)

        def ask(question: str) -> list[int]:
            inputs = session.text(f"{_CONTEXT}Question: {question} Answer:")
            output = session.model.generate(**inputs, **GREEDY)
            return output[0, inputs["input_ids"].shape[1] :].tolist()

        def ask_pressed(question: str) -> list[int]:
            with session.watch.aside(), _fitted(make(kvpress))(session.model):
                return ask(question)

        answers = [ask("Who rebuilt it?")]
        answers.append(ask_pressed("What is its dome made of?"))
        answers.append(ask("What is its dome made of?"))
        answers.append(ask_pressed("Who rebuilt it?"))
        answers.append(ask_pressed("Since when is it a church?"))
        answers.append(ask("Since when is it a church?"))
        answers.append(ask("Who rebuilt it?"))
        return answers


for _name, _make in _PRESSES.items():
    _add(_name, _make)


@scenario("kvpress", 'pipeline("kv-press-text-generation")')
def piped(session: Session) -> Answers:
    import kvpress

    session.attach(session.model)
    pipe = pipeline("kv-press-text-generation", model=session.model, tokenizer=session.tokenizer, device="cpu")  # type: ignore[call-overload]
    questions = ["Who rebuilt it?", "What is its dome made of?"]
    answers: Answers = []
    for _ in range(2):
        with session.watch.aside():
            press = _fitted(kvpress.KnormPress(_RATIO))
            answers += pipe(_CONTEXT, questions=questions, press=press, max_new_tokens=12)["answers"]
        answers.append(session.model.generate(**session.text(_CONTEXT), **GREEDY)[0].tolist())
    return answers
