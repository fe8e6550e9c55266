"""Every object of deploy/kubernetes is what the API takes: Kubernetes' own kinds by its schemas, the operators' by kinds.py."""

from __future__ import annotations

import copy
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml  # type: ignore[import-untyped]

from tests.deploy.kinds import SHAPES, misfits
from tests.support.manifests import BUILDS, KUBERNETES, TOOLS, Object, build, every, named, need_tools, of_kind

# The oldest for which the manifests are meant (docs/kubernetes.md), and the newest whose schemas there are.
OLDEST, NEWEST = "1.34", "1.37"


@cache
def schema_of(version: str, api_version: str, kind: str) -> jsonschema_rs.Draft4Validator | None:
    """The schema of a kind, by which fields that are not there are refused, too; None if there is no such kind."""
    need_tools()
    (directory,) = TOOLS.parent.glob(f"lib/*/site-packages/kubernetes_validate/*/v{version}.0-local-strict")
    # without the domain of the group, as in networking.k8s.io/v1
    group, _, number = api_version.rpartition("/")
    file = directory / "-".join(filter(None, (kind.lower(), group.partition(".")[0], f"{number}.json")))
    if not file.exists():
        return None

    def local(address: str) -> Any:
        return json.loads((directory / address.rpartition("/")[2]).read_text())

    return jsonschema_rs.Draft4Validator(json.loads(file.read_text()), retriever=local)


def refused(objects: list[Object]) -> list[str]:
    """What the API of both versions would not take."""
    found = []
    for version in (OLDEST, NEWEST):
        for each in objects:
            name, schema = each["metadata"]["name"], schema_of(version, each["apiVersion"], each["kind"])
            if schema is None:
                found.append(f"{version} {name}: no kind {each['kind']} of {each['apiVersion']}")
            else:
                errors = [f"{error.instance_path}: {error.message}" for error in schema.iter_errors(each)]
                found += [f"{version} {name}: {error}" for error in errors]
    return found


def is_operators(each: Object) -> bool:
    return (each["apiVersion"], each["kind"]) in SHAPES


def test_everything_is_built_and_nothing_is_left_out() -> None:
    files = {path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml"}
    lists = {path: yaml.safe_load(path.read_text()) for path in KUBERNETES.rglob("kustomization.yaml")}
    named_ = {
        (path.parent / name).resolve()
        for path, each in lists.items()
        for name in [*each.get("resources", []), *each.get("components", []), *(p.get("path", "") for p in each.get("patches", []))]
        if name
    }  # fmt: skip
    assert {path for path in files if path.resolve() not in named_} == set()
    reached = {(KUBERNETES / directory).resolve() for directory in BUILDS}
    assert {path.parent for path in lists if path.parent.resolve() not in named_ | reached} == set()
    assert len(list(every())) > 80


def test_kubernetes_takes_every_object_of_its_own_kinds() -> None:
    own = [each for _, each in every() if not is_operators(each)]
    assert len(own) > 60
    assert refused(own) == []


def test_every_object_of_an_operator_has_only_known_fields() -> None:
    found = [each for _, each in every() if is_operators(each)]
    assert {(each["apiVersion"], each["kind"]) for each in found} == set(SHAPES)
    wrong = [
        line
        for each in found
        for line in misfits(each["spec"], SHAPES[each["apiVersion"], each["kind"]], each["metadata"]["name"])
    ]
    assert wrong == []


def test_a_wrong_field_a_wrong_type_and_an_unknown_kind_are_refused() -> None:
    relay = named(of_kind("overlays/production", "Deployment"), "relay")
    misspelt, text, elsewhere = (copy.deepcopy(relay) for _ in range(3))
    misspelt["spec"]["template"]["spec"]["terminationGracePeriod"] = 90
    text["spec"]["replicas"] = "two"
    elsewhere["apiVersion"] = "apps/v9"
    assert len(refused([relay, misspelt, text, elsewhere])) == 2 * 3
    assert refused([relay]) == []


def test_a_wrong_field_of_an_operator_is_noticed() -> None:
    scaled = named(of_kind("overlays/production", "ScaledObject"), "worker")
    shape = SHAPES[scaled["apiVersion"], scaled["kind"]]
    spec = copy.deepcopy(scaled["spec"])
    spec["minReplicas"] = 2
    spec["maxReplicaCount"] = "10"
    spec["fallback"]["behavior"] = "more"
    spec["triggers"][0]["metadata"]["value"] = 20
    assert [line.partition(":")[0] for line in misfits(spec, shape, "s")] == [
        "s.minReplicas", "s.fallback.behavior", "s.maxReplicaCount", "s.triggers[0].metadata.value",
    ]  # fmt: skip


def closed(schema: Any) -> Any:
    """A definition's schema that refuses fields it does not know, as the API does with `kubectl apply --validate=strict`.

    Without what only Go's patterns have. Rules in CEL (x-kubernetes-validations) are not checked.
    """
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(each) for name, each in schema.items() if name != "properties"}
    if "(?i)" in str(found.get("pattern")):
        del found["pattern"]
    if isinstance(properties := schema.get("properties"), dict):
        found["properties"] = {name: closed(each) for name, each in properties.items()}
        if "additionalProperties" not in found and not found.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    return found


@pytest.mark.skipif("CRDS" not in os.environ, reason="needs the operators' definitions: make kubernetes CRDS=DIR")
def test_the_operators_own_definitions_take_every_object() -> None:
    known: dict[tuple[str, str], Any] = {}
    for path in Path(os.environ["CRDS"]).rglob("*.yaml"):
        for each in yaml.safe_load_all(path.read_text()):
            if (each or {}).get("kind") == "CustomResourceDefinition":
                for version in each["spec"]["versions"]:
                    kind = (f"{each['spec']['group']}/{version['name']}", each["spec"]["names"]["kind"])
                    known[kind] = closed(version["schema"]["openAPIV3Schema"])
    wrong = []
    for _, each in every():
        kind = (each["apiVersion"], each["kind"])
        if is_operators(each):
            check = jsonschema_rs.Draft4Validator(known[kind])
            wrong += [f"{kind} {error.instance_path}: {error.message}" for error in check.iter_errors(each)]
    assert wrong == []
    for kind in SHAPES:
        assert not jsonschema_rs.Draft4Validator(known[kind]).is_valid({"spec": {"nothing": 1}})


@pytest.mark.parametrize("directory", BUILDS)
def test_everything_is_in_one_namespace(directory: str) -> None:
    namespace = "shop-staging" if "staging" in directory else "shop"
    assert {each["metadata"].get("namespace") for each in build(directory) if each["kind"] != "Namespace"} == {
        namespace
    }
    assert [each["metadata"]["name"] for each in of_kind(directory, "Namespace")] in ([], [namespace])


@pytest.mark.parametrize("directory", BUILDS)
def test_no_secret_is_in_the_repository(directory: str) -> None:
    assert of_kind(directory, "Secret") == []
    assert not any("password: " in yaml.safe_dump(each.get("data", {})) for each in build(directory))
