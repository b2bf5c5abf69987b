"""K/V on disk and layers in files are found by what a model is, not by where it lies or how it is loaded."""

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    StreamingConfig,
    load_streamed,
    stop_streaming,
    stream_layers,
    streaming_stats,
)
from tests.conftest import as_inputs, random_ids
from tests.internals.cache import ComputePace, ModelFingerprint
from tests.internals.cli import main

IDS = random_ids(200, seed=1)
LAYERS = 5

pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")


def write_checkpoint(folder: Path | str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=LAYERS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=199,
        **settings,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def plain(name: Path | str, **told: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(name, **told)


def streamed(name: Path | str, folder: Path | str, first: int = 1, **told: Any) -> Any:
    config = StreamingConfig(keep_first_k=first, disk_folder=str(folder))
    model = load_streamed(str(name), config, device="cpu", **told)
    stats = streaming_stats(model)
    assert stats is not None
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def found_on_disk(model: PreTrainedModel, tier: Path) -> int:
    """Tokens of the prompt that come from the disk."""
    with closing(ChunkStore(model, chunk_size=64, tiers=["ram:1GB", f"disk:{tier}:1GB"])) as store:
        cache = ChunkReuseCache(model, store)
        model.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=1)
        return cache.report.tier_tokens.get("disk", 0)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder of its own, with a checkpoint `m`; and nothing computes faster than it is loaded."""
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1.0)
    monkeypatch.chdir(tmp_path)
    write_checkpoint("m")
    return tmp_path


def rewritten(name: str) -> PreTrainedModel:
    streamed(name, "A")
    shutil.rmtree("A")
    return streamed(name, "A")


def stopped(name: str) -> PreTrainedModel:
    model = streamed(name, "A")
    stop_streaming(model)
    return model


def elsewhere(name: str) -> PreTrainedModel:
    shutil.copytree(name, "other/place")
    shutil.rmtree(name)
    return plain("other/place")


def by_link(name: str) -> PreTrainedModel:
    os.symlink(name, "link")
    return streamed("link", "A")


def in_shards(name: str) -> PreTrainedModel:
    plain(name).save_pretrained("shards", max_shard_size="40KB")
    assert len(list(Path("shards").glob("*.safetensors"))) > 2
    return streamed("shards", "A")


def downloaded(name: str) -> PreTrainedModel:
    """As huggingface_hub lays files out, with what it notes of them."""
    Path("snapshots/1").mkdir(parents=True)
    for path in Path(name).iterdir():
        os.symlink(path.absolute(), Path("snapshots/1") / path.name)
    model = plain("snapshots/1")
    model.config._commit_hash = "0" * 40
    model.config.auto_map = {"AutoConfig": "somebody/m--configuration.Config"}
    return model


MIXED = {"model.layers.1": "disk", "model.layers.2": "disk", "model.norm": "disk", "lm_head": "disk"}
MIXED |= {f"model.layers.{n}": "cpu" for n in (0, 3, 4)}
MIXED |= {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu"}
FFN_ONLY = StreamingConfig(residency_mode="ffn_only_stream", disk_folder="A")
IN_HOST_TOO = StreamingConfig(residency_mode="full_stream", host_budget="60KB", disk_folder="A")
WAYS: dict[str, Callable[[str], PreTrainedModel]] = {
    "streamed": lambda name: streamed(name, "A"),
    "another plan": lambda name: streamed(name, "A", 2),
    "another folder": lambda name: streamed(name, "B"),
    "feed-forward parts": lambda name: load_streamed(name, FFN_ONLY, device="cpu"),
    "partly in host memory": lambda name: load_streamed(name, IN_HOST_TOO, device="cpu"),
    "files written anew": rewritten,
    "from memory": lambda name: stream_layers(plain(name), StreamingConfig(disk_folder="A"), device="cpu"),
    "no longer streamed": stopped,
    "./m": lambda name: plain(f"./{name}"),
    "absolute": lambda name: plain(Path(name).absolute()),
    "a link": by_link,
    "moved": elsewhere,
    "in shards": in_shards,
    "downloaded": downloaded,
    "cpu_offload": lambda name: cpu_offload(plain(name), torch.device("cpu")),
    "a device map": lambda name: plain(name, device_map=MIXED, offload_folder="B"),
    "disk_offload": lambda name: disk_offload(plain(name), "A", torch.device("cpu")),
}


@pytest.mark.daily
@pytest.mark.parametrize("way", WAYS)
def test_the_same_model_is_found(way: str, here: Path) -> None:
    model = plain("m")
    wanted = logits(model)
    assert found_on_disk(model, here / "tier") == 0
    again = WAYS[way]("m")
    assert torch.equal(logits(again), wanted)
    assert found_on_disk(again, here / "tier") == 192


def test_a_model_that_was_made_here_is_found_when_it_is_loaded(here: Path) -> None:
    assert found_on_disk(write_checkpoint("m"), here / "tier") == 0
    assert found_on_disk(plain("m"), here / "tier") == 192


_IN_ANOTHER = """
import sys, torch
from tests.parity.test_content_names import *
ComputePace.seconds_per_token = lambda self, model: 1.0
print(found_on_disk(streamed(sys.argv[1], "C", 0), Path(sys.argv[2])))
"""


@pytest.mark.slow
def test_another_process_in_another_folder_finds_it(here: Path) -> None:
    assert found_on_disk(streamed("m", "A"), here / "tier") == 0
    (here / "elsewhere").mkdir()
    told = [sys.executable, "-W", "ignore", "-c", _IN_ANOTHER, "../m", str(here / "tier")]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        told, cwd=here / "elsewhere", env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ended.stdout == "192\n", ended.stderr


def changed_setting(name: str, value: Any) -> PreTrainedModel:
    config = json.loads(Path("m/config.json").read_text())
    assert config[name] != value
    Path("m/config.json").write_text(json.dumps({**config, name: value}))
    return streamed("m", "A")


def changed_bit(number: int) -> PreTrainedModel:
    model = stopped("m")
    layers: Any = model.model.layers
    with torch.no_grad():
        layers[number].mlp.up_proj.weight.view(torch.int32)[-1, -1] ^= 1
    return stream_layers(model, StreamingConfig(keep_first_k=1, disk_folder="A"), device="cpu")


OTHERS: dict[str, Callable[[], PreTrainedModel]] = {
    "weights": lambda: write_checkpoint("n", seed=1),
    "dtype": lambda: streamed("m", "A", dtype=torch.bfloat16),
    "setting": lambda: changed_setting("rms_norm_eps", 1e-3),
    "a bit of a layer that stays": lambda: changed_bit(0),
    "a bit of a layer in a file": lambda: changed_bit(2),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_not_found(other: str, here: Path) -> None:
    assert found_on_disk(streamed("m", "A"), here / "tier") == 0
    assert found_on_disk(OTHERS[other](), here / "tier") == 0


def test_code_of_a_checkpoint_is_named_by_its_text(here: Path) -> None:
    config = json.loads(Path("m/config.json").read_text())
    auto = {"AutoConfig": "modeling_of_m.Config", "AutoModelForCausalLM": "modeling_of_m.Model"}
    Path("m/config.json").write_text(json.dumps({**config, "model_type": "of_m", "auto_map": auto}))
    text = (
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'of_m'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
        "    def forward(self, input_ids=None, **kwargs):\n        return super().forward(input_ids, **kwargs)\n"
    )
    Path("m/modeling_of_m.py").write_text(text)
    shutil.copytree("m", "moved")
    shutil.copytree("m", "changed")
    Path("changed/modeling_of_m.py").write_text(text.replace("(input_ids,", "(input_ids=input_ids,"))
    names = [ModelFingerprint().durable(plain(each, trust_remote_code=True)) for each in ("m", "moved", "changed")]
    assert names[0] == names[1] != names[2]
    assert all(isinstance(name, bytes) for name in names)


def test_many_models_share_a_folder() -> None:
    """Two checkpoints, two dtypes, two modes, two copies: each one's layers stay, and stay right."""
    write_checkpoint("n", seed=1)
    wanted = {name: logits(plain(name)) for name in "mn"}
    half = logits(plain("m", dtype=torch.bfloat16))
    models = [
        (streamed("m", "F"), wanted["m"]),
        (streamed("n", "F"), wanted["n"]),
        (streamed("m", "F", dtype=torch.bfloat16), half),
        (load_streamed("n", StreamingConfig(residency_mode="ffn_only_stream", disk_folder="F")), wanted["n"]),
        (stream_layers(plain("m"), StreamingConfig(keep_first_k=2, disk_folder="F"), device="cpu"), wanted["m"]),
        (stream_layers(plain("n"), StreamingConfig(keep_first_k=0, disk_folder="F"), device="cpu"), wanted["n"]),
    ]
    for _ in range(2):
        assert all(torch.equal(logits(model), expected) for model, expected in models)
    written = {path: path.stat().st_mtime_ns for path in Path("F").glob("layer-*")}
    assert len(written) == 4 + 4 + 4 + 5 + 1  # the last model streams a layer more; all others are shared
    assert torch.equal(logits(streamed("m", "F")), wanted["m"])
    assert {path: path.stat().st_mtime_ns for path in Path("F").glob("layer-*")} == written
    stop_streaming(models[0][0])
    assert torch.equal(logits(models[0][0]), wanted["m"])
    assert torch.equal(logits(models[4][0]), wanted["m"])


def test_more_layers_than_open_files_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    resource, room = pytest.importorskip("resource"), 3
    monkeypatch.setattr(resource, "getrlimit", lambda _: (len(os.listdir("/dev/fd")) + 16 + room, 4096))
    with pytest.raises(OSError, match=r"4 layers in files need as many open files.*Raise the limit: `ulimit -n \d+`"):
        streamed("m", "F")
    model = plain("m")
    wanted = logits(model)
    with pytest.raises(OSError, match="4 layers in files"):
        stream_layers(model, StreamingConfig(keep_first_k=1, disk_folder="F"), device="cpu")
    assert torch.equal(logits(model), wanted)
    room = 4
    assert torch.equal(logits(streamed("m", "F")), wanted)


def test_layers_outlast_their_folder_and_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, model = logits(plain("m")), streamed("m", "F")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert torch.equal(logits(model), wanted)
    shutil.rmtree("../F")
    assert torch.equal(logits(model), wanted)
    stop_streaming(model)
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_checkpoint_that_was_replaced_with_its_times_is_noticed(in_place: bool) -> None:
    write_checkpoint("n", seed=1)
    streamed("m", "F")
    path, other = Path("m/model.safetensors"), Path("n/model.safetensors")
    before = path.stat()
    if in_place:
        path.write_bytes(other.read_bytes())
    else:
        os.replace(shutil.copy(other, "new"), path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert torch.equal(logits(streamed("m", "F")), logits(plain("n")))


def test_layers_that_are_there_are_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By path, nor by content when the checkpoint has moved: then they are loaded, and not written."""
    wanted = logits(streamed("m", "F"))
    before = {path: path.stat().st_mtime_ns for path in Path("F").glob("layer-*")}
    loads: list[Any] = []
    from tests.internals.offload import Checkpoint

    load = Checkpoint.load
    monkeypatch.setattr(Checkpoint, "load", lambda *args: (loads.append(args), load(*args))[1])
    assert torch.equal(logits(streamed("./m/../m", "F")), wanted)
    assert len(loads) == 1  # the layer that stays
    shutil.move("m", "moved")
    assert torch.equal(logits(streamed("moved", "F")), wanted)
    assert len(loads) == 1 + LAYERS
    assert {path: path.stat().st_mtime_ns for path in Path("F").glob("layer-*")} == before


def test_prune(capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint("n", seed=1)
    models = {name: streamed(name, "F") for name in "mn"}
    wanted = logits(models["m"])
    del models["n"]
    gc.collect()
    for flags, says, left in ((["--dry-run"], "Would remove 4 files", 8), ([], "Removed 4 files", 4)):
        assert main(["prune", "F", *flags]) == 0
        said = capsys.readouterr().out
        assert "in use   m: 4 files" in said
        assert "unused   n: 4 files" in said
        assert says in said
        assert len(list(Path("F").glob("layer-*"))) == left
    assert torch.equal(logits(models["m"]), wanted)
    del models["m"]
    gc.collect()
    for _ in range(50):  # a thread may still read what would have come next
        assert main(["prune", "F"]) == 0
        if not list(Path("F").iterdir()):
            break
        time.sleep(0.1)
    assert not list(Path("F").iterdir())
    assert main(["prune", "F"]) == 0
    for folder, why in (("missing", "There is no folder"), ("m", "holds no streamed layers")):
        assert main(["prune", folder]) == 2
        assert why in capsys.readouterr().err


def test_prune_leaves_what_another_process_uses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    streamed("m", "F")
    gc.collect()
    text = "import sys; f = open(sys.argv[1], 'rb'); import fcntl; fcntl.flock(f, fcntl.LOCK_SH); print(1, flush=True)"
    path = next(Path("F").glob("layer-*"))
    told = [sys.executable, "-c", f"{text}; sys.stdin.read()", str(path)]
    with subprocess.Popen(told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "1\n"
        assert main(["prune", "F"]) == 0
        assert [each.name for each in Path("F").glob("layer-*")] == [path.name]
        assert "in use   m: 1 file " in capsys.readouterr().out
        holder.kill()
    assert main(["prune", "F"]) == 0
    assert not list(Path("F").iterdir())
