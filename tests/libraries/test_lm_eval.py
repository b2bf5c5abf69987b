"""lm_eval, stock, over the embedded model: `kvboost-hf` answers as `hf` does, with every beginning computed once.

lm_eval is in the environment of the other libraries, see test_libraries.py. Elsewhere all of this is skipped.
"""

import json
import runpy
import sys
import tomllib
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvboost_hf import ChunkStore, attach
from kvboost_hf.assets import load_embedded
from tests.conftest import counted

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(
        find_spec("lm_eval") is None, reason="`python -m tests.environments libraries` makes its place"
    ),
    pytest.mark.filterwarnings("ignore"),  # those of libraries
]

PEOPLE, CITIES, THINGS = "Anna Max Maria Jane Paul Kate".split(), "Oslo Rome Denver Paris".split(), "lamp box".split()
FACTS = [f"{who} lives in {CITIES[number % 4]}. The {THINGS[number % 2]} is red." for number, who in enumerate(PEOPLE)]
DOCS = [{"about": " ".join(FACTS), "who": who, "cities": CITIES, "city": n % 4} for n, who in enumerate(PEOPLE)]
COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/docs.json, train: {folder}/docs.json}}}}
test_split: test
fewshot_split: train
fewshot_config: {{sampler: first_n}}
"""
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{about}} Where does {{who}} live?"
doc_to_choice: "{{cities}}"
doc_to_target: city
num_fewshot: 5
metric_list: [{metric: acc}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{who}} {{about}}"
metric_list: [{metric: word_perplexity}]
""",
    "generated": """
output_type: generate_until
doc_to_text: "{{about}} {{about}} Where does {{who}} live?"
doc_to_target: "{{cities[city]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tasks with local data."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    (tmp_path / "docs.json").write_text(json.dumps(DOCS))
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(COMMON.format(name=name, folder=tmp_path) + text)
    return tmp_path


def evaluated(lm: Any, task: str, folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Metrics, and the answers to all requests."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=lm, tasks=[task], task_manager=manager, bootstrap_iters=0, log_samples=True, random_seed=0
    )
    samples = sorted(found["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return found["results"][task], [answer for sample in samples for answer in sample["filtered_resps"]]


@pytest.mark.parametrize(("task", "share"), [("choices", 0.25), ("rolling", 1.2), ("generated", 0.5)])
def test_answers_of_hf_with_fewer_tokens(task: str, share: float, tasks: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    from kvboost_hf.lm_eval import KVBoostHF

    metrics, answers, tokens = [], [], []
    for kind in (HFLM, KVBoostHF):
        model, tokenizer = load_embedded()
        long = {"max_length": 100} if task == "rolling" else {}  # several windows for each text
        lm = kind(pretrained=model, tokenizer=tokenizer, batch_size=4, **long)
        with counted(model) as work:
            found, answered = evaluated(lm, task, tasks)
        metrics.append({name: value for name, value in found.items() if isinstance(value, float)})
        answers.append(answered)
        tokens.append(work.tokens)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5)
    assert len(metrics[1]) > 0
    for found, wanted in zip(answers[1], answers[0], strict=True):
        if isinstance(wanted, tuple):  # a log-likelihood, and whether it is greedy
            assert found == (pytest.approx(wanted[0], abs=1e-4), wanted[1])
        else:
            assert found == (wanted if isinstance(wanted, str) else pytest.approx(wanted, rel=1e-5))
    assert tokens[1] <= share * tokens[0]  # the model is tested on some 50 tokens, once


def test_a_model_keeps_its_store_and_long_texts_lose_their_beginning() -> None:
    from lm_eval.models.huggingface import HFLM

    from kvboost_hf.lm_eval import KVBoostHF

    model, tokenizer = load_embedded()
    store = ChunkStore(model)
    context, continuation = (tokenizer(text)["input_ids"] for text in (FACTS[0] * 8, "Anna lives in Oslo."))
    request = (("context", "continuation"), context, continuation)
    ours = KVBoostHF(pretrained=attach(model, store), tokenizer=tokenizer, max_length=40)
    [(found, greedy)] = ours._loglikelihood_tokens([request], disable_tqdm=True)
    assert 0 < store.stats()["tokens"] <= 40
    model, tokenizer = load_embedded()
    stock = HFLM(pretrained=model, tokenizer=tokenizer, max_length=40)
    [want] = stock._loglikelihood_tokens([request], disable_tqdm=True)
    assert found == pytest.approx(want[0], abs=1e-4)
    assert greedy == want[1]


def test_the_name_is_registered_and_the_command_runs(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.api.registry import get_model

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]["lm_eval.models"]
    [(name, value)] = declared.items()
    loaded = EntryPoint(name, value, "lm_eval.models").load()
    assert get_model("kvboost-hf") is loaded
    where = ROOT / "kvboost_hf" / "assets" / "reader"
    command = (
        f"run --model kvboost-hf --model_args pretrained={where} --device cpu --tasks choices --include_path {tasks}"
    )
    monkeypatch.setattr(sys, "argv", ["lm_eval", *command.split()])
    runpy.run_module("kvboost_hf.lm_eval", run_name="__main__")
    assert "|choices|" in capsys.readouterr().out
