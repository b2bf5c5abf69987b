"""What Triton needs beside a GPU is taken away, one thing at a time: there is one warning, and PyTorch computes."""

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime.driver import driver

from tests.internals.attention import active_tier, backends, use_tier
from tests.internals.cli import main
from tests.internals.offload import dispatch
from tests.internals.triton import triton_support

pytestmark = pytest.mark.daily

GPU = torch.device("cuda", 0)
CACHES = [
    backends._choose,
    dispatch.runs_triton,
    triton_support._missing_on_gpus,
    triton_support._warn,
    *(each for each in (getattr(build, "_find_compiler", None), nvidia.libcuda_dirs, nvidia.library_dirs) if each),
]


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton and PyTorch believe that there is one, of sm_86, beside which Triton has compiled nothing so far."""
    for cached in CACHES:
        cached.cache_clear()
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    yield
    for cached in CACHES:
        cached.cache_clear()


def without_package(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(triton_support, "find_spec", lambda name: None)


def without_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    library_of_cuda(monkeypatch, folder)


def with_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("CC", str(folder / "cc"))
    library_of_cuda(monkeypatch, folder)


def without_headers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    compiler = folder / "cc"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    library_of_cuda(monkeypatch, folder)


def without_driver(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(nvidia.subprocess, "check_output", lambda command: b"")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setenv("CC", sys.executable)


def library_of_cuda(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "libcuda.so.1").touch()
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(folder))


Taken = Callable[[pytest.MonkeyPatch, Path], None]
LINUX = sys.platform == "linux"


@pytest.mark.skipif(not LINUX, reason="Triton is compiled for Linux alone")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("take_away", "told"),
    [
        (without_package, "lacks the package triton.* pip install triton, and start again"),
        (without_compiler, "lacks a C compiler.* `apt-get install gcc libc6-dev`, and start again"),
        (with_a_compiler_that_is_not_there, "lacks a C compiler"),
        (without_headers, "lacks headers of C, without which .*/cc fails.* python3-dev`, and start again"),
        (without_driver, "lacks access to the driver of the GPU: libcuda.so cannot found"),
    ],
)
def test_one_warning_names_what_to_install(
    take_away: Taken, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    take_away(monkeypatch, tmp_path)
    with caplog.at_level(logging.WARNING, "kvboost_hf"):
        for device in (GPU, torch.device("cuda", 1)):
            for dtype in (torch.float16, torch.bfloat16):
                assert active_tier(device, dtype) == "sdpa"
            assert not dispatch.runs_triton("auto", device)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(told, record.getMessage(), re.DOTALL), record.getMessage()
    for refused in (lambda: use_tier("triton").__enter__(), lambda: dispatch.runs_triton("triton", GPU)):
        with pytest.raises(ValueError, match="needs " + told.removeprefix("lacks ").split(".*")[0]):
            refused()
    assert active_tier("cpu") == "cpu"


def test_on_windows_the_package_is_another_one() -> None:
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import logging, shutil, subprocess, sys; sys.platform = 'win32'\n"
            + _ONLY_THIS
            + "print(module._INSTALL)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "pip install triton-windows\n"


# The module without the package around it, whose imports take seconds.
_ONLY_THIS = f"""
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace
sys.modules['torch'] = SimpleNamespace(device=None)
sys.modules['kvboost_hf'] = SimpleNamespace(forks=SimpleNamespace(lock=lambda: None))
spec = spec_from_file_location('module', {triton_support.__file__!r})
module = module_from_spec(spec)
spec.loader.exec_module(module)
"""


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("launchers", [False, True])
def test_a_driver_from_the_cache_needs_no_compiler(
    launchers: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But Triton 3.6 compiles a launcher for each kernel as well."""
    without_compiler(monkeypatch, tmp_path)
    monkeypatch.setattr(driver, "_active", object.__new__(nvidia.CudaDriver))
    if launchers:
        monkeypatch.setattr(nvidia, "make_launcher", None, raising=False)
    else:
        monkeypatch.delattr(nvidia, "make_launcher", raising=False)
    assert active_tier(GPU) == ("sdpa" if launchers else "triton")
    assert dispatch.runs_triton("auto", GPU) is not launchers
    monkeypatch.setattr(knobs.build, "impl", SimpleNamespace)
    triton_support._missing_on_gpus.cache_clear()
    assert triton_support.missing_for_triton(GPU) is None


_CUDA = re.compile(r"\bcu[A-Z]\w*(?=\s*\()")
_ASK = """
import os, torch
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
from triton.runtime.driver import driver
from kvboost_hf import kernels as triton_support
for path in (os.environ["PATH"], "", ""):
    os.environ["PATH"] = path
    driver._active = driver._default = None
    triton_support._missing_on_gpus.cache_clear()
    print(triton_support.missing_for_triton(torch.device("cuda", 0)))
    triton_support.import_module = lambda name: None  # as if no kernel had a launcher in C
"""


@pytest.mark.slow
@pytest.mark.skipif(not LINUX or shutil.which("gcc") is None, reason="needs gcc")
def test_with_a_compiler_triton_itself_compiles_its_driver(tmp_path: Path) -> None:
    """Against a library that has the functions of CUDA's driver, and does nothing."""
    functions = sorted(set(_CUDA.findall((Path(nvidia.__file__).parent / "driver.c").read_text())))
    (tmp_path / "cuda.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in functions))
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "cuda.c")], check=True)
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CC")},
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path),
    }
    command = [sys.executable, "-c", _ASK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    compiled, *cached = done.stdout.splitlines()
    assert compiled == "None"
    assert cached[-1] == "None"


@pytest.mark.usefixtures("gpu")
def test_doctor_names_the_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_compiler(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    main(["doctor", "--device", "cpu"])
    told = capsys.readouterr().out
    assert re.search(
        r"^--  triton +lacks a C compiler: PyTorch's operations run\n +do: install gcc", told, re.MULTILINE
    )
    assert re.search(r"^ok  kvboost_fa2 +runs as 'sdpa'$", told, re.MULTILINE), told
    assert "do: install gcc and the headers of libc" in told


_WITHOUT = """
import importlib.abc, sys, tempfile

class Lacking(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
import torch
from transformers import LlamaConfig
from kvboost_hf import ChunkReuseCache, StreamingConfig, load_streamed, streaming_stats
from kvboost_hf.assets import load_embedded
from recipes.awq import write_random_awq

model, _ = load_embedded()
model.set_attn_implementation("kvboost_fa2")
ids = torch.arange(4)[None]
assert model.generate(ids, past_key_values=ChunkReuseCache(model), max_new_tokens=3).shape == (1, 7)
sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=512)
with tempfile.TemporaryDirectory() as folder:
    write_random_awq(LlamaConfig(**sizes, num_key_value_heads=2, dtype=torch.float16), folder + "/model")
    streaming = StreamingConfig(keep_first_k=1, disk_folder=folder + "/layers")
    model = load_streamed(folder + "/model", streaming, device="cpu")
    model.generate(ids, max_new_tokens=2)
    print(streaming_stats(model).layer_calls, [name for name in sys.modules if name.startswith("triton")])
"""


@pytest.mark.slow
def test_a_cpu_needs_neither_triton_nor_a_compiler() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CC")}
    command = [sys.executable, "-W", "ignore", "-c", _WITHOUT]
    done = subprocess.run(command, env={**environment, "PATH": ""}, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert done.stdout == "6 []\n"
    assert "Triton" not in done.stderr
    assert done.stderr.count("others need a C++ compiler") == 1  # products in 4 bits are faster with one
