"""Tokens are chosen as generate() chooses them, row by row."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvboost_hf.errors import KVBoostError
from tests.conftest import EOS, VOCAB, make_model, random_ids
from tests.internals.server import Sampler, SamplingOptions, TokenLogprob, choose_rows

pytestmark = pytest.mark.daily

GREEDY = SamplingOptions(max_tokens=16)
SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.5, "top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 1.2, "min_p": 0.05, "top_k": 50, "top_p": 0.95},
]
BIASED = torch.tensor([0.0, 1.0, 2.0, 2.5, -1.0])

# What waits for a device to give values to the host.
WAITS = {Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.__int__, Tensor.__float__, Tensor.__bool__}
WAITS |= {Tensor.nonzero, torch.nonzero, Tensor.unique, torch.unique}


class Waits(TorchFunctionMode):
    """Counts what waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in WAITS
        return func(*args, **(kwargs or {}))


class Only:
    """A constraint that allows some tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.advanced: list[int] = []

    def allowed(self) -> Tensor:
        return torch.zeros(len(BIASED), dtype=torch.bool).index_fill(0, torch.tensor(self.tokens), True)

    def advance(self, token: int) -> None:
        self.advanced.append(token)

    @property
    def finished(self) -> bool:
        return False


@torch.inference_mode()
def continued(model: PreTrainedModel, ids: Tensor, sampler: Sampler, n: int) -> list[int]:
    """`n` tokens, by forwards of the whole row."""
    row = ids[0].tolist()
    for _ in range(n):
        row.append(sampler.choose(model(torch.tensor([row])).logits[0, -1])[0])
    return row[ids.shape[1] :]


def draws(options: SamplingOptions, logits: Tensor, n: int) -> Counter[int]:
    sampler = Sampler(options, [0])
    return Counter(sampler.choose(logits)[0] for _ in range(n))


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_greedy_is_that_of_generate(penalty: float) -> None:
    model, ids = make_model("llama"), random_ids(12)
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, repetition_penalty=penalty)[0, 12:].tolist()
    sampler = Sampler(SamplingOptions(max_tokens=12, repetition_penalty=penalty), ids[0].tolist())
    assert continued(model, ids, sampler, 12) == expected


@pytest.mark.parametrize("options", SAMPLED)
def test_seeded_draws_are_those_of_generate(options: dict[str, Any]) -> None:
    model, ids = make_model("llama"), random_ids(12)
    model.generation_config.eos_token_id = None
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = model.generate(ids, max_new_tokens=12, do_sample=True, **{"top_k": 0, **options})[0, 12:].tolist()
    sampler = Sampler(SamplingOptions(max_tokens=12, seed=7, **options), ids[0].tolist())
    assert continued(model, ids, sampler, 12) == expected
    other = Sampler(SamplingOptions(max_tokens=12, seed=8, **options), ids[0].tolist())
    assert continued(model, ids, other, 12) != expected


def test_draws_have_the_distribution() -> None:
    n = 4000
    drawn = draws(SamplingOptions(max_tokens=n, temperature=1.3, seed=0), BIASED, n)
    expected = (BIASED / 1.3).softmax(0) * n
    assert _chi_square(drawn, expected) < 18.5  # 4 degrees of freedom: once in 1000
    assert _chi_square(drawn, BIASED.softmax(0) * n) > 18.5


def _chi_square(drawn: Counter[int], expected: Tensor) -> float:
    counts = torch.tensor([float(drawn[token]) for token in range(len(expected))])
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {2, 3}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.8}, {2, 3}),
        ({"min_p": 0.2}, {1, 2, 3}),
        ({"logit_bias": {3: -100, 2: -100}}, {0, 1, 4}),
    ],
)
def test_what_is_cut_off_never_comes(options: dict[str, Any], kept: set[int]) -> None:
    assert set(draws(SamplingOptions(max_tokens=1, temperature=1.0, seed=0, **options), BIASED, 400)) == kept


def test_penalties_by_hand() -> None:
    # 3 (2.5) comes first. Then presence and frequency: 2.5 - 0.3 - 0.3 = 1.9 < 2.0, and so on.
    sampler = Sampler(SamplingOptions(max_tokens=9, presence_penalty=0.3, frequency_penalty=0.3), [2, 2, 2])
    assert [sampler.choose(BIASED)[0] for _ in range(6)] == [3, 2, 3, 3, 2, 3]
    # Presence alone is taken off once: 2.5 - 0.6 = 1.9, 2.0 - 0.6 = 1.4, and then 3 for ever.
    sampler = Sampler(SamplingOptions(max_tokens=9, presence_penalty=0.6), [])
    assert [sampler.choose(BIASED)[0] for _ in range(5)] == [3, 2, 3, 3, 3]
    # Repetition counts the prompt: 2.5 / 2 = 1.25, so 2; then 2.0 / 2 = 1.0, so 3.
    sampler = Sampler(SamplingOptions(max_tokens=9, repetition_penalty=2.0), [3])
    assert [sampler.choose(BIASED)[0] for _ in range(2)] == [2, 3]


def test_bias_and_its_bounds() -> None:
    assert Sampler(SamplingOptions(max_tokens=1, logit_bias={4: 100}), []).choose(BIASED)[0] == 4
    with pytest.raises(ValueError, match="`logit_bias` must name tokens from 0 to 4, got 5"):
        Sampler(SamplingOptions(max_tokens=1, logit_bias={5: 1}), []).choose(BIASED)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_decide_and_are_told(temperature: float) -> None:
    constraint = Only(0, 4)
    sampler = Sampler(SamplingOptions(max_tokens=50, temperature=temperature, seed=1, constraint=constraint), [])
    chosen = [sampler.choose(BIASED)[0] for _ in range(50)]
    assert set(chosen) == ({0, 4} if temperature else {0})
    assert constraint.advanced == chosen


def test_logprobs_are_of_the_distribution_as_it_is() -> None:
    logprobs = BIASED.log_softmax(0).tolist()
    options = SamplingOptions(max_tokens=1, temperature=0.1, logit_bias={0: 100}, logprobs=2)
    token, told = Sampler(options, []).choose(BIASED)
    assert token == 0
    assert isinstance(told, TokenLogprob)
    assert told.token == 0
    assert told.logprob == pytest.approx(logprobs[0])
    assert [t for t, _ in told.top] == [3, 2]
    assert [p for _, p in told.top] == pytest.approx([logprobs[3], logprobs[2]])
    none = Sampler(SamplingOptions(max_tokens=1, logprobs=0), []).choose(BIASED)[1]
    assert none == TokenLogprob(3, pytest.approx(logprobs[3]), ())  # type: ignore[arg-type]
    every = Sampler(SamplingOptions(max_tokens=1, logprobs=20), []).choose(BIASED)[1]
    assert every is not None
    assert len(every.top) == len(BIASED)


def _mixed() -> list[Sampler]:
    options = [
        GREEDY,
        SamplingOptions(max_tokens=16, temperature=1.0, seed=3),
        GREEDY,
        SamplingOptions(max_tokens=16, temperature=0.8, top_p=0.9, seed=3, logprobs=3, repetition_penalty=1.2),
        SamplingOptions(max_tokens=16, logprobs=1, presence_penalty=0.5, logit_bias={5: 2.0}),
    ]
    return [Sampler(option, [1, 2, 3]) for option in options]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_together_are_rows_alone(dtype: torch.dtype) -> None:
    steps = torch.randn(10, 5, VOCAB, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype)
    before = steps.clone()
    together, alone = _mixed(), _mixed()
    for logits in steps:
        assert choose_rows(together, logits) == [s.choose(row) for s, row in zip(alone, logits, strict=True)]
    assert torch.equal(steps, before)
    # Company changes nothing: the second row in another place of a smaller batch.
    company = _mixed()[1::-1]
    expected = [choose_rows(_mixed()[:2], steps[0, :2])[i] for i in (1, 0)]
    assert choose_rows(company, steps[0, :2].flip(0)) == expected


class Broken(Only):
    """A constraint that cannot be followed, from the start or after the first token."""

    def allowed(self) -> Tensor:
        if not self.tokens:
            raise KVBoostError("No.")
        return super().allowed()

    def advance(self, token: int) -> None:
        raise KVBoostError("No more.")


def test_what_breaks_one_row_leaves_the_others_as_they_are() -> None:
    options = SamplingOptions(max_tokens=9, temperature=1.0, seed=4)
    broken = [
        SamplingOptions(max_tokens=9, constraint=Broken()),
        SamplingOptions(max_tokens=9, constraint=Broken(2)),
        SamplingOptions(max_tokens=9, logit_bias={99: 1.0}),
    ]
    samplers = [Sampler(o, []) for o in (broken[0], options, broken[1], GREEDY, broken[2], options)]
    alone = Sampler(options, [])
    for _ in range(5):
        chosen = choose_rows(samplers, BIASED.expand(6, -1))
        expected = alone.choose(BIASED)
        assert [chosen[1], chosen[3], chosen[5]] == [expected, (3, None), expected]
        assert [type(chosen[row]) for row in (0, 2, 4)] == [KVBoostError, KVBoostError, ValueError]
    with pytest.raises(KVBoostError, match="No more"):
        samplers[2].choose(BIASED)


def test_the_device_is_waited_for_once() -> None:
    samplers = _mixed()
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        with Waits() as waits:
            choose_rows(samplers, logits)
        assert waits.count == 1
    with Waits() as waits:
        [sampler.choose(row) for sampler, row in zip(samplers, logits, strict=True)]
    assert waits.count == 5
    assert choose_rows([], torch.empty(0, VOCAB)) == []


def test_cold_is_greedy_and_without_a_seed_draws_differ() -> None:
    logits = torch.full((VOCAB,), 1e3).index_fill(0, torch.tensor([EOS]), 1.01e3)
    assert Sampler(SamplingOptions(max_tokens=1, temperature=1e-40), []).choose(logits)[0] == EOS
    flat, options = torch.zeros(VOCAB), SamplingOptions(max_tokens=1, temperature=1.0)
    rows = [[sampler.choose(flat)[0] for _ in range(8)] for sampler in (Sampler(options, []), Sampler(options, []))]
    assert rows[0] != rows[1]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"logprobs": -1}, "logprobs"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p"),
        ({"temperature": 1.0, "top_k": -1}, "top_k"),
        ({"temperature": 1.0, "min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "penalty"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        Sampler(SamplingOptions(max_tokens=1, **options), [])
