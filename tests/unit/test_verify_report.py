"""What follows from figures: verdict, recommendation, table, figure, JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from kvboost_hf import CorrectnessReport, ReusePolicy, ReuseReport
from kvboost_hf.config import KVQuantConfig, Repair
from tests.internals.cache import make_codec
from tests.internals.verify import (
    EXACT,
    FULL,
    NAIVE,
    ArmResult,
    Call,
    Coding,
    ComparedArm,
    PromptResult,
    compare,
    figure,
    highest_share,
    named_policies,
)

pytestmark = pytest.mark.daily

MIN_PROMPTS = CorrectnessReport.min_prompts

PLAIN = PromptResult(
    prompt=0,
    kl=(0.0, 0.0),
    agreeing_steps=2,
    first_divergence=None,
    divergence_gap=None,
    max_difference=0.0,
    prompt_tokens=100,
    reused_tokens=0,
    forwarded_tokens=100,
    moved_tokens=0,
    recomputed_tokens=0,
    bypass_reason=None,
    moved_reason=None,
)


def blended(
    ratio: float, kl: float, agreeing: int = 2, repair: Repair = "query", moving: int = MIN_PROMPTS
) -> ArmResult:
    """A cold prompt, and some of 100 tokens of which 80 were moved."""
    again = round(80 * ratio)
    moved = replace(
        PLAIN,
        kl=(kl, kl),
        agreeing_steps=agreeing,
        reused_tokens=80 - again,
        forwarded_tokens=20 + again,
        moved_tokens=80,
        recomputed_tokens=again,
    )
    policy = ReusePolicy(mode="blend", repair=repair, recompute_ratio=ratio)
    return ArmResult(ComparedArm(policy), (PLAIN, *(replace(moved, prompt=1 + n) for n in range(moving))))


def report_of(*arms: ArmResult, exact: PromptResult = PLAIN, dtype: str = "float32") -> CorrectnessReport:
    plain = tuple(replace(PLAIN, prompt=n) for n in range(1 + MIN_PROMPTS))
    return CorrectnessReport(
        model="Model",
        dtype=dtype,
        tolerance=0.05,
        max_kl=0.01,
        min_agreement=0.99,
        arms=(ArmResult(FULL, plain), ArmResult(EXACT, (replace(exact, prompt=0), *plain[1:])), *arms),
    )


def test_the_cheapest_that_is_good_enough_is_recommended() -> None:
    naive = ArmResult(NAIVE, blended(0.0, 0.2, 1).prompts)
    report = report_of(naive, blended(0.15, 0.011), blended(0.3, 0.009), blended(0.5, 0.001))
    assert report
    assert report.recommended == ReusePolicy(mode="blend", repair="query", recompute_ratio=0.3)
    assert "recommended is query 30%" in report.verdict
    assert [arm.name for arm in report.arms] == ["full", "exact", "naive", "query 15%", "query 30%", "query 50%"]


def test_quality_is_that_of_prompts_with_moved_tokens() -> None:
    arm = blended(0.15, 0.04, agreeing=1)
    assert arm.mean_kl == pytest.approx(0.04)  # not 0.02: the cold prompt does not count
    assert arm.agreement == 0.5
    assert arm.forwarded_share == (100 + 32 * MIN_PROMPTS) / (100 + 100 * MIN_PROMPTS)


@pytest.mark.parametrize("kl", [0.0, 0.001])
def test_few_prompts_recommend_nothing(kl: float) -> None:
    naive = ArmResult(NAIVE, blended(0.0, kl, moving=MIN_PROMPTS - 1).prompts)
    report = report_of(naive, blended(0.3, kl, moving=MIN_PROMPTS - 1))
    assert report
    assert report.recommended == ReusePolicy()
    assert "something was moved in 7 of 9 prompts, and it takes 8 of them" in report.verdict
    of_many = report_of(ArmResult(NAIVE, blended(0.0, 0.2, 1).prompts), blended(0.3, kl, moving=2))
    assert of_many.recommended == ReusePolicy()
    assert (
        "query 30% computes 63% and meets the thresholds, but it moved something in only 2 prompts" in of_many.verdict
    )
    enough = report_of(ArmResult(NAIVE, blended(0.0, kl).prompts))
    assert enough.recommended.repair == "none"
    assert "None of 8 answers changed: with 95% confidence, no more than 31% of such answers do." in enough.verdict


def test_how_many_answers_may_change() -> None:
    assert highest_share(0, 8) == pytest.approx(1 - 0.05 ** (1 / 8))
    assert highest_share(0, 300) == pytest.approx(3 / 300, rel=0.01)  # the rule of three
    assert highest_share(1, 2) == pytest.approx(0.95**0.5)
    assert highest_share(8, 8) == 1
    assert [highest_share(n, 16) for n in range(17)] == sorted(highest_share(n, 16) for n in range(17))


def coded(kl: float, agreeing: int = 2, tokens: int = 99, kept: Coding | None = None) -> ArmResult:
    prompt = replace(PLAIN, kl=(kl, kl), agreeing_steps=agreeing, forwarded_tokens=1, coded_tokens=tokens)
    kept = kept or Coding("int8", make_codec("int8"), None)
    return ArmResult(ComparedArm(ReusePolicy(), coding=kept), (prompt,))


LIVE = Coding("live turboquant:4", None, KVQuantConfig())


@pytest.mark.parametrize(
    ("arm", "right", "said"),
    [
        (
            coded(1e-8),
            True,
            "int8 is within the thresholds, with a mean KL of 1e-08 and an agreement of 100.00%. None of",
        ),
        (coded(0.011), False, "int8 is NOT within the thresholds, with a mean KL of 0.011"),
        (coded(0.001, agreeing=1), False, "agreement must be 99.00%"),
        (coded(float("nan")), False, "NOT within"),
        (coded(0.0, tokens=0), False, "int8: NO VERDICT, for no K/V was read as codes."),
        (coded(0.0, tokens=0, kept=LIVE), False, "of longer prompts than these"),
    ],
)
def test_codecs_are_judged_by_the_thresholds(arm: ArmResult, right: bool, said: str) -> None:
    report = report_of(arm)
    assert bool(report) == right
    assert said in str(report)
    assert "WRONG" not in report.verdict  # that is for what promises to be exact
    assert report.recommended == ReusePolicy()
    assert report.as_dict()["ok"] == right


@pytest.mark.parametrize(
    ("gap", "dtype", "right"), [(0.09, "bfloat16", True), (0.11, "bfloat16", False), (0.09, "float32", False)]
)
def test_rounding_is_not_held_against_a_codec(gap: float, dtype: str, right: bool) -> None:
    arm = coded(0.001, agreeing=1)
    arm = replace(arm, prompts=tuple(replace(p, first_divergence=1, divergence_gap=gap) for p in arm.prompts))
    report = report_of(arm, dtype=dtype)
    assert bool(report) == right
    assert ("100.00% but for near-ties. 1 of 1 answers changed." in report.verdict) == right
    assert not report_of(replace(arm, prompts=tuple(replace(p, kl=(0.1, 0.1)) for p in arm.prompts)), dtype=dtype)


@pytest.mark.parametrize(
    ("arms", "why"),
    [
        ((), "nothing could be moved"),
        ((blended(0.15, 0.02),), "keeps the mean KL within 0.01"),
        ((blended(0.15, 0.001, agreeing=1),), "agreement at 99.0% or above"),
        ((blended(0.15, float("nan")),), "keeps the mean KL"),
        ((blended(1.0, 0.0),), "computes less"),
    ],
)
def test_exact_is_recommended_where_nothing_is_better(arms: tuple[ArmResult, ...], why: str) -> None:
    report = report_of(*arms)
    assert report
    assert report.recommended == ReusePolicy()
    assert why in report.verdict
    assert "exact reuse is recommended" in str(report)


def test_the_default_is_marked() -> None:
    of_default = replace(blended(0.15, 0.0001), arm=ComparedArm(ReusePolicy(mode="blend")))
    shown = str(report_of(blended(0.3, 0.0), of_default))
    assert "auto 15% *" in shown
    assert "* ReusePolicy(mode='blend'), the default of moved chunks" in shown
    assert "*" not in str(report_of(blended(0.3, 0.0)))


def test_few_prompts_show_which_is_best() -> None:
    """They are too few to recommend it, but not to say what was seen."""
    found = report_of(blended(0.3, 0.0, moving=3), blended(0.15, 0.001, moving=3), blended(0.05, 1.0, moving=3))
    assert "of what was seen, query 15% is best" in found.verdict
    assert found.recommended == ReusePolicy()
    assert "of what was seen, no policy" in report_of(blended(0.05, 1.0, moving=3)).verdict


def test_arms_by_name() -> None:
    default, at_15 = ReusePolicy(mode="blend"), ReusePolicy(mode="blend", repair="query", recompute_ratio=0.15)
    assert named_policies(["default", "query:15", "default"]) == (default, at_15)
    assert len(named_policies(["query"])) == 6
    assert len(named_policies(["all"])) == 23
    with pytest.raises(ValueError, match="got 'exact'"):
        named_policies(["exact"])


def test_why_nothing_was_moved() -> None:
    told = replace(PLAIN, moved_reason="its positions are not rotary")
    assert "moved (its positions are not rotary)" in report_of(ArmResult(NAIVE, (told,))).verdict


@pytest.mark.parametrize(
    ("exact", "dtype", "right"),
    [
        (replace(PLAIN, max_difference=0.04), "float32", True),
        (replace(PLAIN, max_difference=0.06), "float32", False),
        (replace(PLAIN, max_difference=float("nan")), "float32", False),
        (replace(PLAIN, max_difference=0.04, first_divergence=1, divergence_gap=0.01), "float32", False),
        (replace(PLAIN, max_difference=0.04, first_divergence=1, divergence_gap=0.09), "bfloat16", True),
        (replace(PLAIN, max_difference=0.04, first_divergence=1, divergence_gap=0.11), "bfloat16", False),
    ],
)
def test_exact_reuse_may_differ_by_rounding_only(exact: PromptResult, dtype: str, right: bool) -> None:
    report = report_of(blended(0.3, 0.001), exact=exact, dtype=dtype)
    assert bool(report) == right
    assert ("WRONG" in report.verdict) != right
    assert (report.recommended.mode == "blend") == right  # nothing is recommended on ground that does not hold


def test_json_comes_back() -> None:
    report = report_of(blended(0.15, float("nan")), blended(0.3, 0.001))
    content = report.as_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["arms"][2]["mean_kl"] is None
    assert content["recommended"]["recompute_ratio"] == 0.3
    assert content["ok"] is True


@pytest.mark.parametrize("repair", ["none", "auto", "selective", "query"])
def test_no_two_policies_of_an_arm_share_a_name(repair: Repair) -> None:
    """Two that differ in `progressive` alone are two arms, of two lines in the figure."""
    arms = [ComparedArm(ReusePolicy(mode="blend", repair=repair, progressive=value)) for value in (None, True, False)]
    names = [replace(arm, warmed=warmed).name for arm in arms for warmed in (False, True)]
    assert len(set(names)) == 6
    own = {"none": "none", "auto": "auto 15%", "selective": "selective 16", "query": "query 15%"}[repair]
    once = "naive" if repair == "none" else f"{own}, once"
    assert names[::2] == [own, f"{own}, progressive", once]


def test_figure(tmp_path: Path) -> None:
    arms = [blended(ratio, 0.1 * (1 - ratio) ** 4, repair=repair) for ratio in (0.1, 0.5) for repair in REPAIRS]
    for number, value in enumerate((True, False)):
        policy = ReusePolicy(mode="blend", progressive=value)
        arms.append(ArmResult(ComparedArm(policy, warmed=value), blended(0.15, 0.01 + number).prompts))
    figure(tmp_path / "verify.png", report_of(ArmResult(NAIVE, blended(0, 0.3, 1).prompts), *arms))
    assert (tmp_path / "verify.png").read_bytes().startswith(b"\x89PNG")
    figure(tmp_path / "nothing.png", report_of(coded(0.1)))
    assert (tmp_path / "nothing.png").exists()


REPAIRS = get_args(Repair)


def test_compare_stops_at_the_first_token_that_differs() -> None:
    logits = torch.tensor([[4.0, 1.0, 0.0], [0.0, 2.0, 1.5], [1.0, 0.0, 0.0]])
    other = logits.clone()
    other[1] = torch.tensor([0.0, 1.0, 1.5])
    other[2] = 100 * torch.rand(3)
    plain, ours = Call([0, 1, 0], (4.0, 5.0, 6.0), 6.0, logits), Call([0, 2], (1.0, 2.5), 2.5, other[:2])
    found = compare(0, plain, ours, ReuseReport())
    assert (found.first_token, found.answer) == (0.25, 0.5)
    assert (found.first_divergence, len(found.kl), found.agreeing_steps) == (1, 2, 1)
    assert found.kl[0] == 0
    p, q = logits[1].softmax(0), other[1].softmax(0)
    assert found.kl[1] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert found.divergence_gap == pytest.approx(0.5 / float(logits[1].std()))
    assert found.max_difference == pytest.approx(1 / float(logits[1].std()))
