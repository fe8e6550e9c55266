"""The manifests of deploy/kubernetes as kustomize builds them, and what is in them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.support.documents import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
TOOLS = ROOT / ".venv-kubernetes" / "bin"
# What is applied: each with all that it builds on.
BUILDS = (
    "overlays/production", "overlays/production/dependencies", "overlays/production/migrate", "overlays/staging",
    "overlays/staging/dependencies", "overlays/staging/migrate",
)  # fmt: skip
WORKLOADS = ("Deployment", "StatefulSet", "Job")
Object = dict[str, Any]


def need_tools() -> None:
    """Skip the test where they are not installed; `make test` and `make kubernetes` install them."""
    if not (TOOLS / "kubectl").exists():
        pytest.skip("needs .venv-kubernetes: make kubernetes")


@cache
def build(directory: str) -> list[Object]:
    """The objects of a kustomization."""
    need_tools()
    done = subprocess.run(
        [TOOLS / "kubectl", "kustomize", KUBERNETES / directory], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def every() -> Iterator[tuple[str, Object]]:
    """All objects, with what they are built by."""
    for directory in BUILDS:
        for each in build(directory):
            yield directory, each


def of_kind(directory: str, *kinds: str) -> list[Object]:
    """The objects of some kinds."""
    return [each for each in build(directory) if each["kind"] in kinds]


def named(objects: list[Object], name: str) -> Object:
    """The object of this name."""
    (found,) = [each for each in objects if each["metadata"]["name"] == name]
    return found


def pod(workload: Object) -> Object:
    """The specification of its pods."""
    found: Object = workload["spec"]["template"]["spec"]
    return found


def labels(workload: Object) -> dict[str, str]:
    """The labels of its pods."""
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return found


def containers(workload: Object) -> list[Object]:
    """All its containers, those that begin first too."""
    spec = pod(workload)
    return [*spec.get("initContainers", []), *spec["containers"]]


def main_container(workload: Object) -> Object:
    """The container that the pod is there for."""
    found: Object = pod(workload)["containers"][0]
    return found


def ours() -> list[tuple[str, Object, Object]]:
    """Every container that runs the project's image: by what it is built, its workload, and it."""
    return [
        (directory, workload, container)
        for directory, workload in every()
        if workload["kind"] in WORKLOADS
        for container in containers(workload)
        if container["image"].startswith("registry.example/shop:")
    ]


def matches(selector: Object, found: dict[str, str]) -> bool:
    """Whether a label selector matches these labels. An empty one matches all."""
    if any(found.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In", each
        if found.get(each["key"]) not in each["values"]:
            return False
    return True


def environment(container: Object) -> dict[str, str]:
    """The variables that its manifest sets, as Kubernetes puts them together; "secret" where a Secret has one.

    Only what stands earlier in the list is put in, and the rest stays as it is: that is a mistake here.
    """
    known: dict[str, str] = {}
    for each in container.get("env", []):
        value = each.get("value", "secret")
        for name in re.findall(r"\$\((\w+)\)", value):
            assert name in known, f"{each['name']}: {name} is not set before it"
            value = value.replace(f"$({name})", known[name])
        known[each["name"]] = value
    return known


def settings(directory: str, container: Object) -> dict[str, str]:
    """The variables of the ConfigMaps that it reads."""
    found: dict[str, str] = {}
    for each in container.get("envFrom", []):
        found |= named(of_kind(directory, "ConfigMap"), each["configMapRef"]["name"])["data"]
    return found
