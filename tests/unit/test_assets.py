"""The embedded reader: its world, its tokenizer, its files and how well it reads."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from kvboost_hf.assets import EMBEDDED_DRAFT_DIR, EMBEDDED_MODEL_DIR, load_embedded, load_embedded_draft
from recipes import train_hybrid
from recipes.evaluate import accuracy, answer, chat_accuracy, encode_chat
from recipes.evaluate_draft import (
    Round,
    Rounds,
    assisted_answer,
    assisted_rounds,
    held_out_prompts,
    use_constant_drafts,
)
from recipes.train import (
    CURRICULUM,
    IGNORED_LABEL,
    MAX_POSITIONS,
    CopyStage,
    ReadingStage,
    build_model,
    build_tokenizer,
    make_copy_batch,
    make_reading_batch,
    train,
)
from recipes.train_draft import build_draft, distill
from tests.internals.assets import MAX_SUBJECTS, ChatTurn, Document, chat_messages, make_chat, make_documents

pytestmark = pytest.mark.daily

MAX_BYTES = 12_000_000
HELD_OUT_SEED = 77
MIN_ACCURACY = 0.9
MAX_CHANCE = 0.2  # most attributes have 8 to 24 values
MAX_DRAFT_BYTES = 1_000_000
MIN_ACCEPTANCE = 0.6


@pytest.fixture(scope="module")
def reader() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    return load_embedded()


@pytest.fixture(scope="module")
def model(reader: tuple[LlamaForCausalLM, PreTrainedTokenizerFast]) -> LlamaForCausalLM:
    return reader[0]


@pytest.fixture(scope="module")
def tokenizer(reader: tuple[LlamaForCausalLM, PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return reader[1]


@pytest.fixture(scope="module")
def draft() -> LlamaForCausalLM:
    return load_embedded_draft()


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerFast) -> list[torch.Tensor]:
    return held_out_prompts(tokenizer, 20, seed=HELD_OUT_SEED)


class TestWorld:
    def test_same_seed_same_documents(self) -> None:
        first, again, other = (make_documents(random.Random(seed), 6) for seed in (3, 3, 4))
        assert first == again
        assert first != other
        assert make_chat(random.Random(3)) == make_chat(random.Random(3))

    @pytest.mark.parametrize("pronoun_start", [False, True])
    def test_every_question_of_a_prompt_has_one_answer(self, pronoun_start: bool) -> None:
        for seed in range(20):
            documents = make_documents(random.Random(seed), 24, pronoun_start=pronoun_start)
            asked = Counter(fact.question for document in documents for fact in document.facts)
            assert max(asked.values()) == 1

    def test_subjects_are_not_shared_between_documents(self) -> None:
        documents = make_documents(random.Random(0), 24)
        subjects = [{fact.subject for fact in document.facts} for document in documents]
        assert sum(map(len, subjects)) == len(set().union(*subjects))

    def test_one_sentence_for_each_fact(self) -> None:
        for document in make_documents(random.Random(0), 24):
            sentences = _sentences(document)
            assert len(sentences) == len(document.facts)
            for sentence, fact in zip(sentences, document.facts, strict=True):
                assert fact.value in sentence
                assert (sentence.split()[0] in {"It", "She", "He"}) == fact.pronoun
                assert fact.pronoun or sentence == fact.answer

    def test_a_pronoun_refers_to_the_subject_of_the_sentence_before(self) -> None:
        for seed in range(20):
            for document in make_documents(random.Random(seed), 6):
                assert not document.facts[0].pronoun
                for before, fact in pairwise(document.facts):
                    assert not fact.pronoun or fact.subject == before.subject

    def test_pronoun_start_goes_on_about_the_last_subject(self) -> None:
        for seed in range(20):
            documents = make_documents(random.Random(seed), 6, pronoun_start=True)
            assert not documents[0].facts[0].pronoun
            for before, document in pairwise(documents):
                assert document.facts[0].pronoun
                assert document.facts[0].subject == before.facts[-1].subject
                assert all(fact.pronoun for fact in document.facts if fact.subject == before.facts[-1].subject)

    @pytest.mark.parametrize("share", [0.0, 1 / 3, 0.6])
    def test_pronoun_share(self, share: float) -> None:
        documents = [
            document for seed in range(20) for document in make_documents(random.Random(seed), 24, pronoun_share=share)
        ]
        by_pronoun = [fact.pronoun for document in documents for fact in document.facts]
        assert sum(by_pronoun) / len(by_pronoun) == pytest.approx(share, abs=0.03)

    def test_excluded_subjects_do_not_occur(self) -> None:
        told = {fact.subject for document in make_documents(random.Random(0), 12) for fact in document.facts}
        more = make_documents(random.Random(1), 12, exclude=told)
        assert told.isdisjoint(fact.subject for document in more for fact in document.facts)

    def test_too_many_documents(self) -> None:
        with pytest.raises(ValueError, match=f"only {MAX_SUBJECTS} subjects"):
            make_documents(random.Random(0), 100)

    @pytest.mark.parametrize("wrong", [{"count": -1}, {"count": 1, "num_words": 0}, {"count": 1, "pronoun_share": 1}])
    def test_wrong_arguments(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"`.* must "):
            make_documents(random.Random(0), **wrong)

    def test_a_chat_asks_about_what_it_has_told(self) -> None:
        turns = make_chat(random.Random(0), 30, num_words=32)
        told: set[str] = set()
        num_earlier = 0
        for turn in turns:
            new = {fact.question for document in turn.documents for fact in document.facts}
            told |= new
            assert turn.fact.question in told
            num_earlier += turn.fact.question not in new
        assert 5 < num_earlier < 25
        assert len({turn.fact.question for turn in turns}) == len(turns)

    def test_chat_messages_want_an_answer_for_each_past_turn(self) -> None:
        turns = make_chat(random.Random(0), 3)
        messages = chat_messages(turns, ["yes", "no"], system=None)
        assert [message["role"] for message in messages] == ["user", "assistant"] * 2 + ["user"]
        with pytest.raises(ValueError, match="one fewer than the 3 turns"):
            chat_messages(turns, ["yes"])


class TestTokenizer:
    @given(text=st.text(st.characters(exclude_categories=["Cs"])))
    @settings(max_examples=200, deadline=None)
    def test_any_text_comes_back(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text

    def test_special_tokens(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert tokenizer.eos_token == "<|im_end|>"
        assert tokenizer.pad_token == tokenizer.bos_token == "<|endoftext|>"
        assert tokenizer.encode("red") == tokenizer.encode("red", add_special_tokens=False)

    def test_chat_template(self, tokenizer: PreTrainedTokenizerFast) -> None:
        messages = [{"role": "user", "content": "Where is Anna?"}, {"role": "assistant", "content": "Here."}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert text == "<|im_start|>user\nWhere is Anna?<|im_end|>\n<|im_start|>assistant\nHere.<|im_end|>\n"
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        assert prompt == "<|im_start|>user\nWhere is Anna?<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(tokenizer.encode(prompt)) == prompt

    def test_a_word_of_the_world_is_one_token(self, tokenizer: PreTrainedTokenizerFast) -> None:
        for document in make_documents(random.Random(0), 24):
            ids = tokenizer.encode(document.text)
            assert len(ids) == len(document.text.split()) + len(document.facts)
            assert 110 <= len(ids) <= 145

    def test_answers_come_back_with_the_same_ids(self, tokenizer: PreTrainedTokenizerFast) -> None:
        for document in make_documents(random.Random(0), 24):
            for fact in document.facts:
                ids = tokenizer.encode(fact.answer)
                assert tokenizer.encode(tokenizer.decode(ids)) == ids

    def test_prompts_of_a_chat_grow_by_a_document_in_each_turn(self, tokenizer: PreTrainedTokenizerFast) -> None:
        turns = make_chat(random.Random(0), 8)
        sizes = [encode_chat(tokenizer, chat_messages(turns[:num_asked])).shape[1] for num_asked in range(1, 9)]
        assert 40 <= sizes[0] <= 80
        assert all(130 <= after - before <= 190 for before, after in pairwise(sizes))


class TestFiles:
    def test_folder_is_small(self) -> None:
        assert sum(path.stat().st_size for path in EMBEDDED_MODEL_DIR.iterdir()) <= MAX_BYTES

    def test_shape_of_the_model(self, model: LlamaForCausalLM) -> None:
        config = model.config
        assert not model.training
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert config.num_hidden_layers >= 3
        assert config.num_key_value_heads == config.num_attention_heads // 2
        assert config.max_position_embeddings >= 4096
        assert config.tie_word_embeddings

    def test_generates_greedily_to_the_end_of_the_turn(
        self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        assert not model.generation_config.do_sample
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert model.generation_config.pad_token_id == tokenizer.pad_token_id

    def test_loads_by_the_auto_classes(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL_DIR)
        assert loaded.dtype == torch.float32
        assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())
        assert AutoTokenizer.from_pretrained(EMBEDDED_MODEL_DIR).get_vocab() == tokenizer.get_vocab()

    @pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
    def test_options_of_loading(self, attn_implementation: str) -> None:
        model, _ = load_embedded(torch.bfloat16, attn_implementation)
        assert model.dtype == torch.bfloat16
        assert model.config._attn_implementation == attn_implementation


class TestDraft:
    def test_folder_is_small(self) -> None:
        assert sum(path.stat().st_size for path in EMBEDDED_DRAFT_DIR.iterdir()) <= MAX_DRAFT_BYTES

    def test_same_tokenizer(self, draft: LlamaForCausalLM, model: LlamaForCausalLM) -> None:
        assert (EMBEDDED_DRAFT_DIR / "tokenizer.json").read_bytes() == (
            EMBEDDED_MODEL_DIR / "tokenizer.json"
        ).read_bytes()
        assert draft.config.vocab_size == model.config.vocab_size
        assert draft.config.max_position_embeddings == model.config.max_position_embeddings
        for name in ("eos_token_id", "pad_token_id", "do_sample"):
            assert getattr(draft.generation_config, name) == getattr(model.generation_config, name)

    def test_smaller(self, draft: LlamaForCausalLM, model: LlamaForCausalLM) -> None:
        assert not draft.training
        assert draft.dtype == torch.float32
        assert draft.config.num_hidden_layers == 1
        assert 6 * draft.num_parameters() < model.num_parameters()
        assert load_embedded_draft(torch.bfloat16).dtype == torch.bfloat16

    def test_most_of_it_is_kept(
        self, draft: LlamaForCausalLM, model: LlamaForCausalLM, prompts: list[torch.Tensor]
    ) -> None:
        found = assisted_rounds(model, draft, prompts, 5)
        assert found.acceptance >= MIN_ACCEPTANCE
        assert found.committed_per_round >= 2

    def test_little_of_an_untrained_one_is_kept(self, model: LlamaForCausalLM, prompts: list[torch.Tensor]) -> None:
        torch.manual_seed(0)
        found = assisted_rounds(model, build_draft(model), prompts[:5], 5)
        assert found.drafted > 0
        assert found.acceptance <= 0.05

    def test_answers_are_those_without_a_draft(
        self, draft: LlamaForCausalLM, model: LlamaForCausalLM, prompts: list[torch.Tensor]
    ) -> None:
        use_constant_drafts(draft, 3)
        for prompt in prompts[:6]:
            plain = model.generate(prompt, attention_mask=torch.ones_like(prompt))[0, prompt.shape[1] :].tolist()
            said, rounds = assisted_answer(model, draft, prompt)
            assert said == plain
            assert sum(each.committed for each in rounds) == len(plain)
            assert len(rounds) < len(plain)

    def test_all_that_the_reader_drafts_for_itself_is_kept(
        self, model: LlamaForCausalLM, prompts: list[torch.Tensor]
    ) -> None:
        twin, _ = load_embedded()
        use_constant_drafts(twin, 3)
        said, rounds = assisted_answer(model, twin, prompts[0])
        assert Rounds(tuple(rounds)).acceptance == 1
        assert rounds[0] == Round(drafted=3, accepted=3, committed=4)
        assert Rounds(tuple(rounds)).committed == len(said)

    @pytest.mark.slow
    def test_one_step_of_the_recipe(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        draft = build_draft(model)
        first = {name: weight.clone() for name, weight in draft.state_dict().items()}
        distill(model, tokenizer, draft, minutes=1e-6)
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
        assert not any(torch.equal(weight, first[name]) for name, weight in draft.state_dict().items())
        assert not draft.training


class TestRecipe:
    def test_builds_the_tokenizer_of_the_folder(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert build_tokenizer().get_vocab() == tokenizer.get_vocab()

    @pytest.mark.parametrize("stage", [stage for stage in CURRICULUM if isinstance(stage, ReadingStage)])
    def test_trains_on_answers_in_the_text_that_the_template_writes(
        self, tokenizer: PreTrainedTokenizerFast, stage: ReadingStage
    ) -> None:
        batch = make_reading_batch(random.Random(0), stage, tokenizer)
        for ids, labels, positions in zip(batch.input_ids, batch.labels, batch.position_ids, strict=True):
            text = str(tokenizer.decode(ids[ids != tokenizer.pad_token_id]))
            assert tokenizer.encode(text) == ids[ids != tokenizer.pad_token_id].tolist()
            wanted = labels != IGNORED_LABEL
            assert torch.equal(labels[wanted], ids[wanted])
            answers = str(tokenizer.decode(labels[wanted])).split("<|im_end|>")
            heads = text.split("<|im_start|>assistant\n")[1:]
            assert all(head.startswith(said) for head, said in zip(heads, answers, strict=False))
            assert (positions.diff() >= 1).all()
            assert positions[-1] < MAX_POSITIONS

    def test_a_hybrid_trains_by_the_same_steps(self, tokenizer: PreTrainedTokenizerFast) -> None:
        torch.manual_seed(0)
        model = train_hybrid.build_model(tokenizer, "LF")
        steps = torch.nn.functional.softplus(model.model.layers[0].linear_attn.dt_bias)
        assert 1e-3 <= steps.min() <= steps.max() <= 0.1
        before = model.model.layers[0].linear_attn.in_proj_qkvz.weight.detach().clone()
        stage = ReadingStage(length=64, num_words=24, pronoun_share=0.0, target=0.0, time_share=1.0, tokens=128)
        train(tokenizer, model, minutes=1e-6, curriculum=(stage,))
        assert not before.equal(model.model.layers[0].linear_attn.in_proj_qkvz.weight)

    def test_first_weights_copy(self, tokenizer: PreTrainedTokenizerFast) -> None:
        torch.manual_seed(0)
        model = build_model(tokenizer)
        stage = CopyStage(length=64, alphabet_size=256, target=1.0, time_share=1.0)
        batch = make_copy_batch(random.Random(0), stage, len(tokenizer))
        with torch.inference_mode():
            guesses = model(input_ids=batch.input_ids).logits[:, :-1].argmax(-1)
        wanted = batch.labels[:, 1:] != IGNORED_LABEL
        assert (guesses == batch.labels[:, 1:])[wanted].float().mean() >= 0.3


class TestReading:
    @pytest.mark.slow
    def test_reads_six_documents(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        measured = accuracy(model, tokenizer, num_documents=6, num_questions=40, seed=HELD_OUT_SEED)
        assert measured.overall >= MIN_ACCURACY
        assert measured.pronoun >= MIN_ACCURACY

    def test_reads_at_positions_beyond_4096(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        turn = make_chat(random.Random(HELD_OUT_SEED), 1)[0]
        prompt = encode_chat(tokenizer, chat_messages([turn]))
        right = torch.tensor([tokenizer.encode(turn.fact.answer)])
        input_ids = torch.cat([prompt, right], dim=1)
        position_ids = torch.arange(4200, 4200 + input_ids.shape[1])[None]
        with torch.inference_mode():
            logits = model(input_ids=input_ids, position_ids=position_ids).logits
        assert logits[0, prompt.shape[1] - 1 : -1].argmax(-1).tolist() == right[0].tolist()

    @pytest.mark.slow
    def test_chats(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        measured = chat_accuracy(model, tokenizer, num_chats=5, seed=HELD_OUT_SEED)
        assert len(measured.questions) == 40
        assert measured.overall >= MIN_ACCURACY

    def test_knows_nothing_of_a_document_that_is_not_shown(
        self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        hidden = accuracy(model, tokenizer, num_documents=6, num_questions=40, seed=HELD_OUT_SEED, hide_document=True)
        assert hidden.overall <= MAX_CHANCE

    @pytest.mark.slow
    def test_bfloat16_reads_as_well(self, tokenizer: PreTrainedTokenizerFast) -> None:
        model, _ = load_embedded(torch.bfloat16)
        measured = accuracy(model, tokenizer, num_documents=6, num_questions=40, seed=HELD_OUT_SEED)
        assert measured.overall >= MIN_ACCURACY - 0.05

    def test_answer_counts_the_prompt(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        fact = make_documents(random.Random(0), 1)[0].facts[0]
        messages = chat_messages([ChatTurn((), fact)], system=None)
        _, num_prompt_tokens = answer(model, tokenizer, messages)
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert num_prompt_tokens == len(tokenizer.encode(prompt))


def _sentences(document: Document) -> list[str]:
    return [f"{sentence}." for sentence in document.text.removesuffix(".").split(". ")]
