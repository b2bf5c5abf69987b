"""The recipe of EAGLE-3 heads: what is trained is what drafts, and its files are those that are loaded."""

import random
from pathlib import Path

import pytest
import torch

from kvboost_hf import TreeDecoding, load_assistant, speculation_stats
from kvboost_hf.assets import load_embedded
from recipes import train_heads
from recipes.train import IGNORED_LABEL, Batch, ReadingStage, make_reading_batch
from tests.internals.assisted import EagleSource, TextStates

SHORT = ReadingStage(length=128, num_words=32, pronoun_share=1 / 3, target=2.0, time_share=1.0, tokens=128)


def test_steps_of_training_are_those_of_drafts() -> None:
    """At each answer token and step: the distribution that heads draft from, with the same text forced."""
    reader, tokenizer = load_embedded()
    torch.manual_seed(0)
    heads = train_heads.build_heads(reader, tokenizer)
    batch = make_reading_batch(random.Random(20_000), SHORT, tokenizer)
    batch = Batch(batch.input_ids[:1], batch.labels[:1], torch.arange(batch.input_ids.shape[1])[None])
    layers = train_heads.LAYERS
    with torch.no_grad():
        shown = reader(batch.input_ids, output_hidden_states=True).hidden_states
        states = torch.cat([shown[layer][:, :-2] for layer in layers], dim=-1)
        steps = list(train_heads._drafted(heads, batch, states))
    for row, position in enumerate((batch.labels[0, 2:] != IGNORED_LABEL).nonzero()[:, 0].tolist()):
        for step, trained in enumerate(steps):
            length = position - step + 2  # tokens of the text; the states are those before its last one
            text = TextStates(layers)
            source = EagleSource(heads, text, layers)
            text.append({layer: shown[layer][:, : length - 1] for layer in layers})
            logits = source.begin(batch.input_ids[:, :length])
            assert logits is not None
            for at in range(step):
                logits = source.forward([int(batch.input_ids[0, length + at])], [at - 1])
            drafted = logits[0, heads.targets].log_softmax(-1)
            torch.testing.assert_close(drafted, trained[row], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_what_it_writes_is_loaded(tmp_path: Path) -> None:
    reader, tokenizer = load_embedded()
    heads = train_heads.build_heads(reader, tokenizer)
    agreed = train_heads.distill(reader, tokenizer, heads, minutes=0.02)
    assert len(agreed) == train_heads.DEPTH
    train_heads.save_heads(heads, tmp_path)
    loaded = load_assistant(str(tmp_path), target=reader, schedule="constant")
    inputs = tokenizer("Maria lives in Rome. Where does Maria live?", return_tensors="pt")
    plain = reader.generate(**inputs, max_new_tokens=12)
    for how in ({"assistant_model": loaded}, {"custom_generate": TreeDecoding(loaded)}):
        assert torch.equal(reader.generate(**inputs, max_new_tokens=12, **how), plain)
    assert speculation_stats(loaded).drafted > 0
