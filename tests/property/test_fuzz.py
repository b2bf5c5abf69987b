"""The fuzzer itself: a seed always gives the same, wrong K/V is found, and what is shown is small and runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fuzz import __main__ as command
from tests.fuzz import jobs
from tests.fuzz.draw import draw_history
from tests.fuzz.families import family
from tests.fuzz.history import CHANGES, Call, History, Row
from tests.fuzz.play import Wrong, play, prepare
from tests.internals.cache import fill

ONCE_WRONG = [
    # A one-token piece was taken for a decoding step.
    History(max_cache_len=512, calls=(Call(rows=(Row(head=9),), new=1, options={"prefill_chunk_size": 8}),)),
    # A `generate()` in a LogitsProcessor took over the cache of the call around it.
    History(reuse="a kept cache", calls=(Call(new=3, nested="processor"),)),
    History(reuse="attach", max_cache_len=512, calls=(Call(new=3, nested="criterion"),)),
    # So did one that came before the first forward of the call around it.
    History(
        reuse="a kept cache",
        calls=(Call(rows=(Row(head=56),), options={"prompt_lookup_num_tokens": 4}, nested="processor"),),
    ),
    # States of a cache whose tokens are not recorded were left behind when it was given buffers that grow.
    History(
        family="nemotron_h",
        reuse="attach",
        max_cache_len=512,
        calls=(Call(rows=(Row(head=1),)), Call(rows=(Row(head=1),), follows=1, only_new=True, new=1)),
    ),
    # A copy of a cache went on with rows that are alike.
    History(
        calls=(
            Call(rows=(Row(head=1), Row(head=1)), new=1),
            Call(rows=(Row(tail=1),), follows=1, only_new=True, copied="deepcopy", new=1),
        )
    ),
    # Llama 4 scales queries by their columns, so that rows which begin alike behind other padding are not alike.
    History(
        family="llama4_text",
        calls=(Call(rows=(Row(head=7), Row(head=17)), new=1, options={"output_hidden_states": -1}),),
    ),
    # Padding that a cache holds was taken off the new ids; a draft of a row was given the processors of all rows.
    History(
        calls=(
            Call(rows=(Row(head=1), Row(head=4)), new=1),
            Call(rows=(Row(head=1),), follows=1, only_new=True, new=4, options={"draft": "trees"}),
        )
    ),
    History(
        calls=(Call(rows=(Row(head=2), Row(head=1)), new=4, options={"draft": "trees", "repetition_penalty": 1.3}),)
    ),
    # Gemma 4 computes the last tokens alone in layers that share K/V, so that the others have no hidden states.
    History(
        family="gemma4_text",
        calls=(Call(rows=(Row(head=40), Row(head=40)), new=1, options={"output_hidden_states": -1}),),
    ),
    # Inkling's configuration has no `use_cache`.
    History(family="inkling_text", reuse="attach", calls=(Call(new=1, loop=True),)),
    # A mask of fewer columns than a cache of a fixed size has.
    History(
        attention="kvboost_fa2",
        reuse="attach",
        max_cache_len=512,
        calls=(
            Call(new=1),
            Call(rows=(Row(head=2),), new=1, options={"prefill_chunk_size": 24, "cache_implementation": "static"}),
        ),
    ),
]


def test_a_seed_gives_one_history_which_its_repr_makes_again() -> None:
    for seed in range(200):
        history = draw_history(seed)
        assert draw_history(seed) == history
        assert eval(repr(history)) == history


@pytest.mark.parametrize("history", ONCE_WRONG, ids=str)
def test_what_was_wrong_once(history: History) -> None:
    assert play(history) == len(history.calls)


ODD: dict[str, dict[str, Any]] = {
    **{how: {"changed": (how, 1)} for how in CHANGES},
    "holes": {"mask": "holes"},
    "right": {"mask": "right"},
    "other": {"embeds": "other"},
}


@pytest.mark.parametrize("how", ODD)
def test_odd_calls_are_served_and_are_odd(how: str) -> None:
    """What is odd about them changes what the model says, so that a cache which does not see it is found."""
    rows = Row(head=40), Row(head=33)
    called, odd = (Call(rows=rows, new=1, **told) for told in ({}, ODD[how]))
    history = History(reuse="a kept cache", calls=(called, odd, called))
    assert play(history) == 3
    steps = prepare(replace(history, calls=(called, odd)), family("llama"), torch.float32)
    before, after = (torch.cat(step.expected["logits"]) for step in steps)
    assert float((before - after).abs().max()) > 0.1


def test_wrong_kv_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The control: what the store serves is zeros."""
    pieces_of = fill.pieces_of

    def zeros(*args: Any) -> Any:
        return [tuple(torch.zeros_like(tensor) for tensor in piece) for piece in pieces_of(*args)]

    monkeypatch.setattr(fill, "pieces_of", zeros)
    monkeypatch.setattr(fill, "_fill_together", lambda *args: set())
    twice = Call(rows=(Row(head=33), Row(head=20, tail=5)), new=3, options={"repetition_penalty": 1.3})
    history = History(family="llama", attention="sdpa", calls=(Call(), twice, twice))
    monkeypatch.setattr(command, "draw_history", lambda seed: history)
    assert command.fuzz(0, 600, 1, []) == 1
    shown = capsys.readouterr().out
    script = shown[shown.index("from tests.fuzz") : shown.rindex(")\n\n") + 1]
    assert len(script) < 200
    with pytest.raises(Wrong, match="standard deviations"):
        exec(script)


def test_engines_of_a_seed_are_right_and_reuse() -> None:
    torch.set_num_threads(1)
    reused = 0
    for seed in (3, 4, 8):
        engines, asked, wrong = jobs.play(seed)
        assert not wrong
        assert asked
        reused += sum(engine.stats()["cached_tokens"] for engine in engines.running)
    assert reused > 100


def test_wrong_answers_and_wrong_kv_of_engines_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the store serves is zeros, and, of the second kind, what it takes."""
    pieces_of = fill.pieces_of

    def zeros(*args: Any) -> Any:
        return [tuple(torch.zeros_like(tensor) for tensor in piece) for piece in pieces_of(*args)]

    monkeypatch.setattr(fill, "pieces_of", zeros)
    monkeypatch.setattr(fill, "_fill_together", lambda *args: set())
    wrong = [text for seed in range(3, 9) for text in jobs.play(seed)[2]]
    assert any("standard deviations" in text for text in wrong)
    assert any("K/V in the store" in text for text in wrong)
