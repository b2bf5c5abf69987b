"""`KVBoost` on a CUDA device."""

from kvboost_hf import GenerationMode, KVBoost
from kvboost_hf.assets import load_embedded
from tests.gpu.device import DEVICE

DOCUMENT = "Maria lives in Rome. She owns the lamp. It is red and costs ten coins. " * 6
PROMPTS = [DOCUMENT + question for question in ("Where does Maria live?", "What colour is the lamp?", "Who?")]


def test_parity() -> None:
    engine = KVBoost(*load_embedded(), device=DEVICE, chunk_size=32)
    assert engine.model.device.type == DEVICE.type
    plain = [engine.generate(prompt, 10, GenerationMode.BASELINE) for prompt in PROMPTS]
    expected = [result.token_ids for result in plain]
    assert engine.warm(DOCUMENT)
    results = [engine.generate(prompt, 10) for prompt in PROMPTS]
    assert [result.token_ids for result in results] == expected
    assert all(result.kv_reuse_ratio > 0.5 for result in results)
    assert all(0 < result.ttft_ms <= result.total_ms for result in results)
    assert [result.token_ids for result in engine.generate_batch(PROMPTS, 10)] == expected
    assert "".join(engine.stream(PROMPTS[0], 10)) == results[0].output_text
