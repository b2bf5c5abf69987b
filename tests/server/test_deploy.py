"""What `deploy/` has: flags and metrics that there are, and files that find each other."""

import json
import os
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvboost_hf import ChunkStore
from kvboost_hf.assets import load_embedded
from tests.internals.cli import apply_config, command_line
from tests.internals.server import Meter, ModelEngine, QueueFullError
from tests.server.conftest import Listening
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "kvboost_hf.json"
UNIT = (DEPLOY / "kvboost-hf.service").read_text("utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVER = COMPOSE["services"]["server"]
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def served_metrics(page: str) -> set[str]:
    """The names of all series of a page in the text format of Prometheus."""
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE)
    return {name + suffix for name, kind in kinds for suffix in SUFFIXES[kind]}


def test_each_metric_of_the_dashboard_is_served(at: Listening) -> None:
    served = served_metrics(at.http.get("/metrics").text)
    named = {name for expression in expressions() for name in re.findall(r"kvboost_\w+", expression)}
    assert len(named) > 8
    assert named <= served
    assert "kvboost_no_such_total" not in served


def test_each_label_of_the_dashboard_is_served(at: Listening, engine: FakeEngine) -> None:
    """Labels in braces and behind `by` are those of the metric."""
    at.openai.completions.create(model="reader", prompt="Anna lives in Oslo.", extra_body={"unknown_field": 1})
    engine.error = QueueFullError("full", 1.0)
    at.http.post("/v1/completions", json={"model": "reader", "prompt": "a"})
    page = at.http.get("/metrics").text
    for expression in expressions():
        names = {*re.findall(r"kvboost_\w+", expression)}
        pairs = {*re.findall(r"(kvboost_\w+){(\w+)=", expression)}
        if "label_replace" not in expression:
            pairs |= {(name, label) for name in names for label in re.findall(r"by \((\w+)\)", expression)}
        for name, label in pairs:
            assert re.search(rf"^{name}{{[^}}]*\b{label}=", page, re.MULTILINE), (name, label)


def test_each_figure_of_the_dashboard_is_the_engine_s(tmp_path: Path) -> None:
    model, tokenizer = load_embedded()
    engine = ModelEngine(model, tokenizer, store=ChunkStore(model, tiers=[f"disk:{tmp_path}"]))
    page = Meter(engine).page().decode()
    engine.close()
    engine.store.close()
    figures = re.findall(r'^kvboost_engine{figure="([^"]+)"}', page, re.MULTILINE)
    asked = [found for one in expressions() for found in re.findall(r'kvboost_engine{figure=~?"([^"]+)"}', one)]
    assert len(asked) == 3
    for pattern in asked:
        for alternative in pattern.replace(r"\\", "\\").split("|"):
            assert any(re.fullmatch(alternative, figure) for figure in figures), alternative
    tiers = next(pattern for pattern in asked if "tiers" in pattern).replace(r"\\", "\\")
    assert {figure for figure in figures if re.fullmatch(tiers, figure)} == {
        "store.tiers.ram.bytes",
        "store.tiers.disk.bytes",
    }


def test_the_dashboard_reads_the_provisioned_source() -> None:
    sources = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources.yaml").read_text("utf-8"))
    [source] = sources["datasources"]
    used = {panel["datasource"]["uid"] for panel in dashboard()["panels"]}
    assert used == {source["uid"]}
    host, port = source["url"].removeprefix("http://").split(":")
    assert host in COMPOSE["services"]
    assert port == "9090"
    [provider] = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "dashboards.yaml").read_text("utf-8"))[
        "providers"
    ]
    mounts = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in dashboard()["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len({*cells})
    assert max(x for x, _ in cells) < 24


def commands() -> dict[str, list[str]]:
    """The arguments of each `kvboost-hf` here."""
    dockerfile = (DEPLOY / "Dockerfile").read_text("utf-8")
    [cmd] = re.findall(r"^CMD (\[.*\])$", dockerfile, re.MULTILINE)
    [start] = re.findall(r"^ExecStart=\S+/kvboost-hf (.*)$", UNIT, re.MULTILINE)
    return {"Dockerfile": json.loads(cmd), "compose": SERVER["command"], "unit": start.split()}


@pytest.mark.parametrize("name", commands())
def test_each_flag_exists(name: str) -> None:
    parser, arguments = command_line(), commands()[name]
    options = parser.parse_args(arguments)
    if options.config is not None:
        options.config = DEPLOY / "serve.toml"
        apply_config(options, parser)
    with pytest.raises(SystemExit):
        parser.parse_args([*arguments, "--no-such-flag"])


def test_what_is_commented_out_in_the_file_of_flags_is_right(tmp_path: Path) -> None:
    text = (DEPLOY / "serve.toml").read_text("utf-8")
    full = tmp_path / "serve.toml"
    full.write_text(re.sub(r"^# ([a-z-]+ = )", r"\1", text, flags=re.MULTILINE))
    assert len(tomllib.loads(full.read_text())) > len(tomllib.loads(text))
    parser = command_line()
    apply_config(parser.parse_args(["serve", "--config", str(full)]), parser)


def test_compose_finds_its_files() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], source
        assert {*service.get("secrets", ())} <= COMPOSE["secrets"].keys()
        assert {*service["networks"]} <= COMPOSE["networks"].keys()
    assert (DEPLOY / SERVER["build"]["context"] / SERVER["build"]["dockerfile"]).is_file()
    given = {part.split("/run/secrets/")[1] for part in SERVER["command"] if "/run/secrets/" in part}
    assert given == {*SERVER["secrets"]}
    [scrape] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    assert scrape["authorization"]["credentials_file"].removeprefix("/run/secrets/") in SERVER["secrets"]
    assert scrape["static_configs"] == [{"targets": ["server:8000"]}]
    assert any(part.startswith("redis://valkey:") for part in SERVER["command"])


def test_no_port_is_open_to_other_machines() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_dockerfile_copies_what_there_is() -> None:
    dockerfile, root = (DEPLOY / "Dockerfile").read_text("utf-8"), DEPLOY.parent
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE) for name in line.split()
    ]
    let_in = re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8"), re.MULTILINE)
    assert {*copied} == {*let_in}
    assert all((root / name).exists() for name in copied)
    extras = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert '".[${EXTRAS}]"' in dockerfile
    named = re.findall(r"\bEXTRAS=([\w,-]+)", dockerfile)
    assert len(named) == 2
    assert all({*each.split(",")} <= extras.keys() for each in named)
    # A build for CPUs stays only where the constraints ask for the same release.
    torch, ours = (
        dockerfile.index(text) for text in ('"$(grep ^torch== constraints.txt)"', "--constraint constraints.txt")
    )
    assert dockerfile.index("COPY constraints.txt") < torch < ours
    assert len(re.findall(r"^torch==", (root / "constraints.txt").read_text("utf-8"), re.MULTILINE)) == 1
    assert dockerfile.rindex("\nUSER 10001") < dockerfile.index("\nENTRYPOINT")


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
@pytest.mark.parametrize("index", ["", "https://download.pytorch.org/whl/cu130", None], ids=["PyPI", "CUDA", "CPU"])
def test_an_image_for_gpus_has_what_triton_compiles_with(index: str | None, tmp_path: Path) -> None:
    """In the last stage, which runs the server, and with the index that the build takes if none is named."""
    dockerfile = (DEPLOY / "Dockerfile").read_text("utf-8")
    head, *stages = re.split(r"^FROM ", dockerfile, flags=re.MULTILINE)
    [default] = re.findall(r"^ARG TORCH_INDEX=(\S+)$", head, re.MULTILINE)
    assert all(re.search(r"^ARG TORCH_INDEX$", stage, re.MULTILINE) for stage in stages)
    [command] = [text for text in re.findall(r"^RUN ((?:.*\\\n)*.*)$", stages[-1], re.MULTILINE) if "apt-get" in text]
    tool, told = tmp_path / "apt-get", tmp_path / "told"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    tool.chmod(0o700)
    script = command.replace("/var/lib/apt/lists", str(tmp_path / "lists"))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TORCH_INDEX": default if index is None else index}
    subprocess.run(["sh", "-ec", script], env=environment, check=True)
    asked = told.read_text().split() if told.exists() else []
    assert ({"gcc", "libc6-dev"} <= {*asked}) == bool(asked) == (index is not None)
    assert stages[-1].index("apt-get") < stages[-1].index("\nUSER 10001")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    command = tmp_path / "kvboost-hf"
    command.write_text("#!/bin/sh\n")
    command.chmod(stat.S_IRWXU)
    unit = tmp_path / "kvboost-hf.service"
    for line, taken in (("", True), ("\nNoSuchSetting=yes\n[Service]\nDynamicUser=perhaps\n", False)):
        unit.write_text(UNIT.replace("/opt/kvboost/bin/kvboost-hf", str(command)) + line)
        run = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
        assert (not run.stderr) is taken, run.stderr


def test_the_unit_is_given_the_secrets_that_it_names() -> None:
    loaded = {*re.findall(r"^LoadCredential=([\w-]+):", UNIT, re.MULTILINE)}
    assert loaded == {*re.findall(r"%d/([\w-]+)", UNIT)} != set()


def test_what_the_unit_writes_is_below_its_folder() -> None:
    """It has no home."""
    [folder] = re.findall(r"^CacheDirectory=(\S+)$", UNIT, re.MULTILINE)
    [line] = re.findall(r"^Environment=(.*)$", UNIT, re.MULTILINE)
    environment = dict(each.split("=", 1) for each in line.split())
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert environment[name].startswith(f"%C/{folder}/")
