"""The manifests for KubeRay: their schemas, and that their parts find each other. No cluster is asked."""

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.internals.server import ClusterArgs

FOLDER = Path(__file__).parents[2] / "deploy" / "kuberay"
OBJECTS = list(yaml.safe_load_all((FOLDER / "kvboost.yaml").read_text("utf-8")))
SCRAPE = yaml.safe_load((FOLDER / "scrape.yaml").read_text("utf-8"))
(SERVICE,) = (each for each in OBJECTS if each["kind"] == "RayService")
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
GROUPS = {"head": CLUSTER["headGroupSpec"], **{each["groupName"]: each for each in CLUSTER["workerGroupSpecs"]}}
SERVED = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
(APPLICATION,) = SERVED["applications"]

_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}
_POD = {"type": "object", "required": ["spec"]}  # checked by Kubernetes' own schema


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


# The fields of ray.io/v1 that are used here, written down from KubeRay's reference of its API (1.7): no other may be.
RAY_SERVICE = _closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata={"type": "object", "required": ["name"]},
    spec=_closed(
        ["serveConfigV2", "rayClusterConfig"],
        serveConfigV2={"type": "string"},
        rayClusterConfig=_closed(
            ["headGroupSpec"],
            rayVersion={"type": "string"},
            enableInTreeAutoscaling={"type": "boolean"},
            autoscalerOptions=_closed(
                [], idleTimeoutSeconds=_COUNT, upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]}
            ),
            headGroupSpec=_closed(["rayStartParams", "template"], rayStartParams=_TEXTS, template=_POD),
            workerGroupSpecs={
                "type": "array",
                "items": _closed(
                    ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
                    groupName={"type": "string"},
                    replicas=_COUNT,
                    minReplicas=_COUNT,
                    maxReplicas=_COUNT,
                    rayStartParams=_TEXTS,
                    template=_POD,
                ),
            },
        ),
    ),
)


def test_the_ray_service_has_fields_that_there_are() -> None:
    jsonschema.validate(SERVICE, RAY_SERVICE)
    for path, value in ((("spec", "serveConfig"), ""), (("spec", "rayClusterConfig", "headGroupSpec", "replicas"), 1)):
        wrong = copy.deepcopy(SERVICE)
        inner = wrong
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, RAY_SERVICE)


def test_kubernetes_takes_all_else() -> None:
    """By its own schemas, strictly: pods of the Ray cluster, too."""
    tool = pytest.importorskip("kubernetes_validate", reason="`make clients` runs it")
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": group["template"]["spec"]}
        for name, group in GROUPS.items()
    ]
    known = [each for each in OBJECTS if each["kind"] != "RayService"]
    assert {each["kind"] for each in known} == {"Service", "Deployment", "NetworkPolicy", "PodDisruptionBudget"}
    for each in [*pods, *known]:
        tool.validate(each, "1.34", strict=True)
    wrong = copy.deepcopy(pods[0])
    wrong["spec"]["containers"][0]["readinessProb"] = {}
    with pytest.raises(tool.ValidationError):
        tool.validate(wrong, "1.34", strict=True)


def test_ray_takes_the_application() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="`make clients` runs it")
    found = schema.ServeDeploySchema.model_validate(SERVED)
    assert [each.name for each in found.applications] == ["kvboost"]
    with pytest.raises(ValueError, match="proxy_location"):
        schema.ServeDeploySchema.model_validate({**SERVED, "proxy_location": "Everywhere"})


def test_the_builder_takes_its_arguments(tmp_path: Path) -> None:
    assert APPLICATION["import_path"] == "kvboost_hf.server.ray_app:app_from"
    args = dict(APPLICATION["args"])
    for name in ("api_keys_file", "operator_keys_file"):
        folder, _, file = args[name].rpartition("/")
        assert all(_mounts(group)["secrets"] == folder for group in GROUPS.values())
        args[name] = str(tmp_path / file)
        (tmp_path / file).write_text(f"{file}-1\n")
        (tmp_path / file).chmod(0o440)  # as the secret has it
    found = ClusterArgs.of(args)
    assert found.settings.api_keys == ("api-keys-1",)
    assert found.settings.operator_keys == ("operator-key-1",)
    with pytest.raises(ValueError, match="replcas"):
        ClusterArgs.of({**args, "replcas": 2})


def _mounts(group: dict[str, Any]) -> dict[str, str]:
    (container,) = group["template"]["spec"]["containers"]
    return {each["name"]: each["mountPath"] for each in container["volumeMounts"]}


def test_parts_find_each_other() -> None:
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in OBJECTS}
    front, replica = (GROUPS[name]["template"] for name in ("front", "replica"))
    args = APPLICATION["args"]
    # Clients: the service, the port of the front, and its probe.
    service = by_name["Service", "kvboost"]["spec"]
    assert service["selector"].items() <= front["metadata"]["labels"].items()
    assert not service["selector"].items() <= replica["metadata"]["labels"].items()
    (container,) = front["spec"]["containers"]
    port = {each["name"]: each["containerPort"] for each in container["ports"]}[service["ports"][0]["targetPort"]]
    assert port == args["server"]["port"] == container["readinessProbe"]["httpGet"]["port"]
    # One front in each of its pods, and one replica on each GPU.
    (options,) = (each["ray_actor_options"] for each in APPLICATION["deployments"] if each["name"] == "Front")
    assert options["resources"] == {"front": 1}
    assert GROUPS["front"]["rayStartParams"]["resources"] == '"{\\"front\\": 1}"'
    assert GROUPS["front"]["maxReplicas"] == args["fronts"]
    limits = replica["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == args["actor_options"]["num_gpus"]
    assert GROUPS["replica"]["maxReplicas"] == args["replicas"]["max_replicas"]
    # The tier, its service, and who may call it.
    (address,) = (tier for tier in args["kept"]["tiers"] if tier.startswith("redis://"))
    host, _, number = address.removeprefix("redis://").partition(":")
    valkey = by_name["Service", host]["spec"]
    assert valkey["ports"][0]["port"] == int(number)
    pods = by_name["Deployment", host]["spec"]["template"]["metadata"]["labels"]
    assert valkey["selector"].items() <= pods.items()
    policy = by_name["NetworkPolicy", host]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pods.items()
    (source,) = policy["ingress"][0]["from"]
    assert source["podSelector"]["matchLabels"].items() <= replica["metadata"]["labels"].items()
    # Figures, with the key of operators.
    assert SCRAPE["spec"]["staticConfigs"] == [{"targets": [f"kvboost:{service['ports'][0]['port']}"]}]
    assert SCRAPE["spec"]["authorization"]["credentials"]["key"] == args["operator_keys_file"].rpartition("/")[2]
    (secret,) = {each["secret"]["secretName"] for each in replica["spec"]["volumes"] if "secret" in each}
    assert SCRAPE["spec"]["authorization"]["credentials"]["name"] == secret


def test_pods_have_time_to_end_and_no_privileges() -> None:
    for group in GROUPS.values():
        pod = group["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > APPLICATION["args"]["server"]["drain_s"] + 30
        assert pod["securityContext"]["runAsUser"] == 10001  # that of the image
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert "httpGet" in container["readinessProbe"]  # the image has no wget
