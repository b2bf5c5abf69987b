"""The checks of TurboQuant's paper on the embedded model; broken codecs, and checks that detect nothing, fail."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from benchmarks.turboquant.__main__ import main
from benchmarks.turboquant.checks import Check
from benchmarks.turboquant.distortion import claimed
from benchmarks.turboquant.heads import read_heads
from benchmarks.turboquant.inner_products import inner_product_checks
from benchmarks.turboquant.needle import make_needles
from benchmarks.turboquant.sabotage import sabotaged
from benchmarks.turboquant.validate import TurboQuantReport, validate_turboquant
from kvboost_hf.assets import load_embedded
from kvboost_hf.config import KVQuantConfig
from tests.conftest import make_model, random_ids
from tests.internals.cache import Codec, Planes, Role, TurboQuant, make_codec

Reader = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]
IDS = torch.arange(3, 203)[None]


@pytest.fixture(scope="module")
def reader() -> Reader:
    return load_embedded()


def validate(reader: Reader, *codecs: str | KVQuantConfig, **settings: Any) -> TurboQuantReport:
    return validate_turboquant(*reader, codecs=codecs, num_tokens=250, depths=[0.5], **settings)


def test_all_checks_pass_and_all_controls_fail(reader: Reader) -> None:
    steps: list[tuple[int, int]] = []
    report = validate(reader, "turboquant:4", "int4", progress=lambda done, total: steps.append((done, total)))
    assert report, report.verdict
    assert report.own_queries
    assert steps == [(n, 8) for n in range(1, 9)]  # raw; each codec, and its 3 and 2 controls
    for check in report.checks:
        if check.allowed and check.name != "needles, raw":
            seeded = "int4" not in check.name
            assert list(check.controls) == ["zeroed", "shuffled", "another seed"][: 3 if seeded else 2], check.name
    names = [check.name for check in report.checks]
    assert sum(name.startswith("distortion") for name in names) == 2 * (4 + 2)
    assert sum(name.startswith("<q, k>") for name in names) == 2 * 3 + 2
    assert [name for name in names if name.startswith("needles")] == [
        "needles, raw",
        "needles, turboquant:4",
        "needles, int4",
    ]
    assert "FAILED" not in str(report)
    assert max(map(len, str(report).splitlines())) <= 100
    told = json.loads(json.dumps(report.as_dict()))
    assert told["ok"]
    assert len(told["checks"]) == len(names)


def zeros(x: torch.Tensor, role: Role) -> torch.Tensor:
    return torch.zeros_like(x)


def shuffled(x: torch.Tensor, role: Role) -> torch.Tensor:
    """Apart from each other: attention does not mind the order of pairs of keys and values."""
    return x.flip(-2) if role == "keys" else x.roll(1, -2)


@pytest.mark.parametrize("broken", [zeros, shuffled])
def test_a_broken_codec_fails_all_checks(
    reader: Reader, broken: Callable[[torch.Tensor, Role], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = TurboQuant.decode

    def decode_broken(codec: TurboQuant, planes: Planes, shape: Any, dtype: Any, role: Role, rotation: Any) -> Any:
        return broken(decode(codec, planes, shape, dtype, role, rotation), role)

    monkeypatch.setattr(TurboQuant, "decode", decode_broken)
    report = validate(reader, "turboquant:4")
    assert not report
    judged = [check for check in report.checks if check.allowed and check.name != "needles, raw"]
    assert list(report.failed) == judged
    assert not any(check.holds for check in judged)
    assert "FAILED" in str(report)


def test_a_biased_codec_fails_what_bias_breaks(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = TurboQuant.decode
    monkeypatch.setattr(TurboQuant, "decode", lambda *args: decode(*args) * 1.1)
    failed = {check.name for check in validate(reader, "turboquant:4").failed}
    assert {"<q, k>, PROD, 4 bits", "<q, k>, MSE, 4 bits", "distortion of keys, 4 bits"} <= failed


def test_what_the_model_does_not_find_shows_nothing(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = type(reader[1]).decode
    monkeypatch.setattr(type(reader[1]), "decode", lambda *args, **kwargs: decode(*args, **kwargs)[:0])
    report = validate(reader, "turboquant:4")
    assert {check.name for check in report.failed} == {"needles, raw", "needles, turboquant:4"}
    assert "it tells nothing" in report.verdict


def test_a_check_that_a_control_passes_fails() -> None:
    allowed = {"error": (0.0, 0.1)}
    assert Check(name="", found={"error": 0.1}, allowed=allowed, controls={"zeroed": {"error": 1.0}}).passed
    blind = Check(name="", found={"error": 0.1}, allowed=allowed, controls={"zeroed": {"error": 0.1}})
    assert blind.holds
    assert blind.undetected == ("zeroed",)
    assert not blind.passed
    assert not Check(name="", found={"error": float("nan")}, allowed=allowed).holds


def test_queries_and_keys_are_those_of_the_models_attention(reader: Reader) -> None:
    eager = load_embedded(attn_implementation="eager")[0]
    with torch.no_grad():
        attentions = eager(input_ids=IDS, output_attentions=True).attentions
    layers, own = read_heads(reader[0], IDS)
    assert own
    for layer, expected in zip(layers, attentions, strict=True):
        logits = layer.queries @ layer.keys.mT * layer.scale
        logits.masked_fill_(torch.arange(IDS.shape[1]) > layer.positions[:, None], -torch.inf)
        torch.testing.assert_close(logits.softmax(-1).reshape(4, 64, -1), expected[0, :, -64:], rtol=1e-4, atol=1e-5)


def test_windows_keep_the_last_keys() -> None:
    layers, own = read_heads(make_model("mistral"), random_ids(100))
    assert own
    assert all(layer.positions.min() >= 0 for layer in layers)
    checks = list(inner_product_checks(layers, {"turboquant:4": KVQuantConfig()}))
    assert all(math.isfinite(value) for check in checks for value in check.found.values())


def test_a_model_without_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="must keep keys and values"):
        read_heads(MambaForCausalLM(MambaConfig(vocab_size=200, hidden_size=32, num_hidden_layers=2)), random_ids(20))


def test_other_attention_takes_drawn_queries() -> None:
    report = validate(load_embedded(attn_implementation="eager"), "turboquant:4")
    assert not report.own_queries
    assert "drawn at random" in report.verdict
    assert report, report.verdict


def test_keys_alone_can_be_sabotaged() -> None:
    x = torch.randn(1, 2, 32, 64, generator=torch.Generator().manual_seed(0))

    def through(codec: Codec, role: Role) -> torch.Tensor:
        planes = {name: plane[0] for name, plane in codec.encode(x, role, [None]).items()}
        return codec.decode(planes, (2, 32, 64), torch.float32, role, None)

    config = KVQuantConfig()
    for damage in ("zeroed", "shuffled", "another seed"):
        codec = sabotaged(config, damage, "keys")
        torch.testing.assert_close(through(codec, "values"), through(make_codec(config), "values"), rtol=0, atol=0)
        assert (through(codec, "keys") - x[0]).norm() > 0.9 * x.norm(), damage


def test_needles_stand_where_they_are_said_to(reader: Reader) -> None:
    tokenizer = reader[1]
    depths = (0.0, 0.25, 0.5, 1.0)
    for depth, needle in zip(depths, make_needles(tokenizer, 600, depths, 0), strict=True):
        paragraphs = tokenizer.decode(needle.ids).split("\n\n")  # type: ignore[arg-type]
        (index,) = (n for n, text in enumerate(paragraphs[:-1]) if text.count(".") == 1 and needle.value in text)
        assert abs(index - depth * (len(paragraphs) - 3)) <= 0.5  # a document follows it, and the question


def test_what_is_claimed_between_whole_bits() -> None:
    assert claimed(3.5) == pytest.approx((claimed(3) + claimed(4)) / 2)
    assert claimed(4) < claimed(3.5) < claimed(3)


def test_own_prompts_are_measured(reader: Reader) -> None:
    one, other = (
        validate(reader, prompts=["The lamp is red. " * 40, text]).checks[0].found for text in ("It is.", "He has it.")
    )
    assert one != other


def test_what_is_refused(reader: Reader) -> None:
    model, tokenizer = reader
    with pytest.raises(ValueError, match="depths"):
        validate_turboquant(model, tokenizer, depths=[1.5])
    with pytest.raises(ValueError, match="A codec must be"):
        validate_turboquant(model, tokenizer, codecs=["int3"])
    with pytest.raises(ValueError, match="eval mode"):
        validate_turboquant(load_embedded()[0].train(), tokenizer)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The lamp is red. " * 40, encoding="utf-8")
    assert main(["turboquant:4", "--prompts", str(prompts), "--json", "-"]) == 0
    told = capsys.readouterr()
    result = json.loads(told.out)
    assert result["ok"] is True
    assert result["checks"][-1]["name"] == "needles, turboquant:4"
    assert result["verdict"] in told.err
