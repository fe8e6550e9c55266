"""What the pods run: commands that parse, variables that are read, users, probes, and the time that they have to end."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import click
import flower.options  # type: ignore[import-untyped]
import pytest
import uvicorn
from typer.main import get_command

from idempotency.broker import rights as broker
from idempotency.cli.root import cli
from idempotency.environment import Environment
from idempotency.settings import PREFIX, Settings
from idempotency.store import rights as store
from idempotency.upkeep import presence
from scripts import kubernetes_secrets
from tests.support.documents import ROOT
from tests.support.encrypted import authority, make_certificates
from tests.support.manifests import (
    KUBERNETES,
    Object,
    build,
    environment,
    every,
    labels,
    main_container,
    matches,
    named,
    of_kind,
    ours,
    pod,
    settings,
)  # fmt: skip
from tests.unit.test_runbooks import UsageError, parse, parse_celery

PRODUCTION, SERVERS = "overlays/production", "overlays/production/dependencies"
PAGE = ROOT / "docs" / "kubernetes.md"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# Seconds between the end that a process takes at most and the moment at which it is killed.
MARGIN = 15
# Who logs in where: the role of Postgres, the user of RabbitMQ, and whether it has hints.
LOGINS = {
    **dict.fromkeys(("worker", "webhooks"), (store.APPLICATION, broker.WORKER, True)),
    "maintenance": (store.RELAY, broker.WORKER, True),
    "relay": (store.RELAY, broker.RELAY, True),
    "beat": (store.RELAY, broker.BEAT, False),
    "metrics": (store.READ_ONLY, broker.MONITOR, False),
    "api": (store.APPLICATION, broker.APPLICATION, True),
    "admin": (store.OPERATOR, broker.APPLICATION, True),
    "web": (store.OPERATOR, broker.MONITOR, True),
}
# What a process of the application says of itself, with the variables of a pod.
SHOW = """
import json
from idempotency.application import settings_of
from scripts import kubernetes_secrets
from tasks import app
app.loader.import_default_modules()
router = app.amqp.router
limits = {}
for name, task in app.tasks.items():
    if not name.startswith("celery."):
        queue = router.route({}, name)["queue"].name
        limits[queue] = max(limits.get(queue, 0), task.time_limit or app.conf.task_time_limit)
given = settings_of(app)
made = kubernetes_secrets.contents()
print(json.dumps({
    "queues": sorted(app.amqp.queues), "limits": limits, "soft_shutdown": app.conf.worker_soft_shutdown_timeout,
    "version": given.code_version, "page": given.web_url, "file": str(given.sign_of_life_file),
    "secrets": [[name, key] for name, content in made.items() for key in content],
    "users": [user["name"] for user in json.loads(made["rabbitmq-definitions"]["rabbitmq.json"])["users"]],
}))
"""


def workloads(directory: str = PRODUCTION) -> list[Object]:
    return of_kind(directory, "Deployment", "StatefulSet")


def option(command: list[str], name: str) -> str:
    (found,) = [part.partition("=")[2] for part in command if part.startswith(f"{name}=")]
    return found


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the application says with the variables of a worker's pod and those of the page's."""
    file = authority(make_certificates(tmp_path_factory.mktemp("certificates")))
    given: dict[str, str] = {}
    for name in ("web", "worker"):
        container = main_container(named(workloads(), name))
        given |= settings(PRODUCTION, container) | environment(container)
    given = {name: value.replace("/certificates/ca.crt", file) for name, value in given.items()}
    given |= dict.fromkeys(kubernetes_secrets.GIVEN, "x") | {
        "SMTP_URL": "smtps://mail.example",
        "IDEMPOTENCY_WEB_SECRET": "s" * 32,
    }
    done = subprocess.run(
        [sys.executable, "-c", SHOW], cwd=ROOT, env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---------------------------------------------------------------- commands


def check(command: list[str]) -> None:
    """Raise unless the program's own parser takes this command."""
    program, *arguments = command
    if program == "idempotency":
        parse(get_command(cli), arguments)
    elif program == "celery" and "flower" in arguments:  # whose options Tornado reads
        known = flower.options.options.as_dict()
        assert {part.partition("=")[0].strip("-").replace("-", "_") for part in arguments[2:]} <= set(known)
    elif program == "celery":
        parse_celery(arguments)
    elif program == "uvicorn":
        with uvicorn.main.make_context(program, list(arguments)) as context:
            module, _, factory = context.params["app"].partition(":")
        assert f"def {factory}(" in (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    elif (program, arguments[0]) == ("python", "-m"):
        assert (ROOT / arguments[1].replace(".", "/")).with_suffix(".py").exists(), arguments[1]
    else:
        assert (program, arguments[0]) == ("test", "-f"), command


@pytest.mark.long
def test_every_command_is_one_and_the_image_has_it() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    found = {tuple(container["command"]) for _, _, container in ours()}
    assert len(found) >= 12
    for command in found:
        check(list(command))
        if command[0] == "python":
            assert f"COPY {command[2].partition('.')[0]} " in DOCKERFILE
        else:
            assert command[0] in {*scripts, "celery", "uvicorn"}
    for _, _, container in ours():
        for probe in probes(container).values():
            if "exec" in probe:
                check(probe["exec"]["command"])


@pytest.mark.parametrize(
    "wrong",
    [
        ["idempotency", "alive", "/tmp/alive", "--for", "3"],
        ["idempotency", "relays"],
        ["celery", "--app=tasks", "work"],
        ["uvicorn", "--factory", "api.application:create", "--port=8000"],
        ["uvicorn", "--ports=8000", "api.application:create_app"],
        ["celery", "--app=tasks", "flower", "--enable-event=False"],
        ["python", "-m", "tasks.migration"],
        ["sh", "-c", "true"],
    ],
)
def test_a_command_that_is_none_is_noticed(wrong: list[str]) -> None:
    with pytest.raises((click.UsageError, UsageError, AssertionError, SystemExit)):
        check(wrong)


def test_the_image_runs_as_the_user_that_the_pods_name() -> None:
    (uid,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert re.search(rf"useradd [^&]*--uid {uid} ", DOCKERFILE)
    users = {pod(workload)["securityContext"]["runAsUser"] for _, workload, _ in ours()}
    assert users == {int(uid)}


@pytest.mark.long
def test_every_queue_is_consumed_by_one_deployment(shown: Any) -> None:
    consumed = [queue for each in consumers().values() for queue in each]
    assert sorted(consumed) == shown["queues"]


def consumers() -> dict[str, list[str]]:
    """The queues of each Deployment of workers."""
    found = {each["metadata"]["name"]: main_container(each)["command"] for each in workloads()}
    return {
        name: option(command, "--queues").split(",")
        for name, command in found.items()
        if command[0] == "celery" and "worker" in command
    }


# ---------------------------------------------------------------- settings and logins


@cache
def read() -> set[str]:
    """The variables that something of ours reads."""
    tree = ast.parse((ROOT / "celeryconfig.py").read_text())
    (own,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Environment"]
    names = {node.target.id.upper() for node in own.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}  # fmt: skip
    names |= {str(field.validation_alias or name.upper()) for name, field in Environment.model_fields.items()}
    names |= {f"{PREFIX}{name}".upper() for name in Settings.model_fields}
    return names | {"CELERY_APP", "FLOWER_BASIC_AUTH"}


def test_every_variable_is_read_by_something() -> None:
    found = set()
    for directory, _, container in ours():
        values = [each.get("value", "") for each in container.get("env", [])]
        # a password that is put into an address
        parts = {each["name"] for each in container.get("env", []) if f"$({each['name']})" in "".join(values)}
        found |= {*environment(container), *settings(directory, container)} - parts
    assert len(found) > 20
    assert found - read() == set()
    assert "IDEMPOTENCY_LEESE" not in read()


@pytest.mark.long
def test_version_and_page_are_those_of_the_manifests(shown: Any) -> None:
    assert (shown["version"], shown["page"]) == ("1.0.0", "https://ops.shop.example")


def test_each_process_logs_in_as_its_role_and_none_as_the_owner() -> None:
    found = {}
    for each in workloads():
        container = main_container(each)
        if container["image"].startswith("redis:"):
            continue
        variables = environment(container)
        postgres, rabbitmq = (
            re.match(r"[\w+]+://(\w+):secret@", variables[name]) for name in ("DATABASE_URL", "BROKER_URL")
        )
        assert postgres is not None
        assert rabbitmq is not None
        user = rabbitmq[1].removeprefix("idempotency_")
        found[each["metadata"]["name"]] = (postgres[1], user, "REDIS_URL" in variables)
        # the password is that user's
        names = {item["valueFrom"]["secretKeyRef"]["name"] for item in container["env"] if "valueFrom" in item}
        assert {f"postgres-{postgres[1].removeprefix('idempotency_').replace('_', '-')}", f"rabbitmq-{user}"} <= names
    assert found == LOGINS
    job = named(build(f"{PRODUCTION}/migrate"), "migrate")
    for container in [*pod(job)["initContainers"], *pod(job)["containers"]]:
        assert environment(container)["DATABASE_URL"].startswith("postgresql+psycopg://deployer:secret@")


def test_roles_get_the_passwords_with_which_processes_log_in() -> None:
    (library,) = pod(named(build(f"{PRODUCTION}/migrate"), "migrate"))["initContainers"]
    given = {name.removesuffix("_PASSWORD").lower() for name in environment(library) if name.startswith("IDEMPOTENCY_")}
    assert given == {role for role, _, _ in LOGINS.values()}


def used_secrets() -> set[tuple[str, str]]:
    """Every Secret and key that a manifest names."""
    found: set[tuple[str, str]] = set()

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if "secretKeyRef" in value:
                found.add((value["secretKeyRef"]["name"], value["secretKeyRef"]["key"]))
            if "secretTargetRef" in value:
                found.update((each["name"], each["key"]) for each in value["secretTargetRef"])
            if "redisSecret" in value:
                found.add((value["redisSecret"]["name"], value["redisSecret"]["key"]))
            if "secretName" in value and "items" in value:
                found.update((value["secretName"], each["key"]) for each in value["items"])
            for each in value.values():
                look(each)
        elif isinstance(value, list):
            for each in value:
                look(each)

    for _, each in every():
        look(each)
        if each["kind"] == "Cluster":
            name = each["spec"]["bootstrap"]["initdb"]["secret"]["name"]
            found |= {(name, "username"), (name, "password")}
    # of a volume with all keys: what its server reads
    return found | {("rabbitmq-definitions", "rabbitmq.json")}


def test_the_page_names_every_secret_and_key() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (`[^|]+`) \|", PAGE.read_text(), re.MULTILINE)
    listed = {(name, key) for name, keys in rows for key in re.findall("`([^`]+)`", keys)}
    assert listed == used_secrets() - {("authority", "ca.crt")}  # which cert-manager writes


def test_the_secrets_that_are_made_are_those_that_are_used(shown: Any) -> None:
    assert {(name, key) for name, key in shown["secrets"]} == used_secrets() - {("authority", "ca.crt")}
    kinds = {user.removeprefix("idempotency_") for user in shown["users"]}
    assert kinds == {kind for _, kind, _ in LOGINS.values()} | {broker.FLOWER}


def test_secrets_that_are_mounted_are_made_by_the_page_or_by_cert_manager() -> None:
    made = {each["spec"]["secretName"] for _, each in every() if each["kind"] == "Certificate"}
    mounted = {
        (volume["secret"]["secretName"], "items" in volume["secret"])
        for _, workload in every()
        if workload["kind"] in ("Deployment", "StatefulSet", "Job")
        for volume in pod(workload)["volumes"]
        if "secret" in volume
    }
    # of the authority's, whose Secret has the key, only the certificate
    assert mounted == {("authority", True), ("redis-certificate", False), ("redis-users", True)}
    assert {"authority", "redis-certificate", "hints-certificate"} <= made
    for kind in ("RedisReplication", "RedisSentinel"):
        (each,) = of_kind(SERVERS, kind)
        assert each["spec"]["TLS"]["secret"] == {"secretName": "hints-certificate"}


@pytest.mark.parametrize("overlay", ["production", "staging"])
def test_a_release_is_one_image_and_says_so(overlay: str) -> None:
    images = {
        container["image"]
        for directory in (f"overlays/{overlay}", f"overlays/{overlay}/migrate")
        for built, _, container in ours()
        if built == directory
    }
    (image,) = images
    (config,) = of_kind(f"overlays/{overlay}", "ConfigMap")
    assert config["data"]["IDEMPOTENCY_CODE_VERSION"] == image.rpartition(":")[2]
    assert image.rpartition(":")[2] != "latest"


# ---------------------------------------------------------------- rights


def test_no_container_may_do_more_than_it_must() -> None:
    for directory, workload in every():
        if workload["kind"] not in ("Deployment", "StatefulSet", "Job"):
            continue
        spec, where = pod(workload), f"{directory}: {workload['metadata']['name']}"
        assert spec["automountServiceAccountToken"] is False, where
        assert spec["enableServiceLinks"] is False, where
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, where
        assert context["runAsUser"] > 0, where
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), where
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }, where  # fmt: skip
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), where
            assert "memory" in container["resources"]["limits"], where
            assert not any("hostPort" in port for port in container.get("ports", [])), where
        assert all({"emptyDir", "secret"} & set(volume) for volume in spec["volumes"]), where
    for account in of_kind(PRODUCTION, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


# ---------------------------------------------------------------- probes


def probes(container: Object) -> dict[str, Any]:
    return {name: each for name, each in container.items() if name.endswith("Probe")}


def test_every_pod_has_probes_and_none_of_life_asks_a_server() -> None:
    for _, workload, container in ours():
        found, name = probes(container), workload["metadata"]["name"]
        if container["name"] != "app" or workload["kind"] == "Job":
            assert "livenessProbe" not in found, name
            continue
        assert set(found) == {"readinessProbe", "livenessProbe"}, name
        life = found["livenessProbe"]
        if "exec" in life:
            file = environment(container)["IDEMPOTENCY_SIGN_OF_LIFE_FILE"]
            program, command, path, option_, within = life["exec"]["command"]
            assert (program, command, path, option_) == ("idempotency", "alive", file, "--within")
            # a turn, the signs that it misses, and a name that is looked up for a minute
            assert float(within) > presence.LONGEST_TURN + 60 + Settings.model_fields["sign_of_life"].default
            assert life["timeoutSeconds"] >= 10, "it starts an interpreter"
            assert found["readinessProbe"]["exec"]["command"] == ["test", "-f", file]
        else:
            assert life.get("httpGet", {"path": "/livez"})["path"] in ("/livez", "/health", "/healthcheck"), name
            asked = [each.get("httpGet") or each["tcpSocket"] for each in found.values()]
            assert {each["port"] for each in asked} <= {port["name"] for port in container["ports"]}


def test_the_paths_of_probes_are_answered() -> None:
    for _, _, container in ours():
        for probe in probes(container).values():
            path = probe.get("httpGet", {}).get("path")
            if path is not None:
                served = {"api": "api/health.py", "web": "idempotency/web/application.py", "flower": None}
                kind = {"uvicorn": "api", "idempotency": "web", "celery": "flower"}[container["command"][0]]
                assert served[kind] is None or f'"{path}"' in (ROOT / str(served[kind])).read_text()


def test_a_file_of_signs_is_where_a_process_may_write() -> None:
    for _, _, container in ours():
        variables = environment(container)
        mounts = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
        for name in ("IDEMPOTENCY_SIGN_OF_LIFE_FILE", "PROMETHEUS_MULTIPROC_DIR"):
            if name in variables:
                assert any(Path(variables[name]).is_relative_to(mount) for mount in mounts), container["name"]


# ---------------------------------------------------------------- the end of a pod


def test_a_worker_may_end_its_tasks_before_it_is_killed(shown: Any) -> None:
    for name, queues in consumers().items():
        grace = pod(named(workloads(), name))["terminationGracePeriodSeconds"]
        assert grace >= shown["soft_shutdown"] + MARGIN, name
        if name != "maintenance":  # whose longest task takes hours, and may be repeated
            assert grace >= max(shown["limits"][queue] for queue in queues) + MARGIN, name
            # what is killed nevertheless is free after its lease
            assert grace >= Settings.model_fields["lease"].default + MARGIN, name
    assert shown["limits"]["maintenance"] > 3600


def test_rabbitmq_waits_longer_for_an_acknowledgement_than_any_task_takes(shown: Any) -> None:
    (rabbitmq,) = of_kind(SERVERS, "RabbitmqCluster")
    given = re.search(r"^consumer_timeout = (\d+)$", rabbitmq["spec"]["rabbitmq"]["additionalConfig"], re.MULTILINE)
    assert given is not None
    assert int(given[1]) / 1000 > max(shown["limits"].values()) + MARGIN


def test_a_relay_may_end_its_turn_and_a_web_server_its_requests() -> None:
    relay = pod(named(workloads(), "relay"))["terminationGracePeriodSeconds"]
    assert relay >= presence.LONGEST_TURN + 10 + MARGIN
    for name in ("api", "admin"):
        workload = named(workloads(), name)
        container = main_container(workload)
        asleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = float(option(container["command"], "--timeout-graceful-shutdown"))
        assert pod(workload)["terminationGracePeriodSeconds"] >= asleep + drain + 5


def test_what_must_not_be_there_twice_is_not() -> None:
    for directory in (PRODUCTION, "overlays/staging"):
        beat, metrics = (named(workloads(directory), name) for name in ("beat", "metrics"))
        assert (beat["kind"], beat["spec"]["replicas"]) == ("StatefulSet", 1)
        # or a release that was never ready would stay, whatever is applied after it
        assert beat["spec"]["podManagementPolicy"] == "Parallel"
        assert (metrics["spec"]["replicas"], metrics["spec"]["strategy"]) == (1, {"type": "Recreate"})


def test_a_drain_leaves_one_of_each_that_has_several() -> None:
    budgets = of_kind(PRODUCTION, "PodDisruptionBudget")
    scaled = {each["metadata"]["name"]: each["spec"]["minReplicaCount"] for each in of_kind(PRODUCTION, "ScaledObject")}
    several = set()
    for workload in workloads():
        name = workload["metadata"]["name"]
        count = scaled.get(name) or workload["spec"].get("replicas")
        held = [each for each in budgets if matches(each["spec"]["selector"], labels(workload))]
        assert len(held) == (count > 1), name
        assert all(each["spec"]["maxUnavailable"] == 1 for each in held)
        if count > 1:
            several.add(name)
            assert workload["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
            zones = [each["topologyKey"] for each in pod(workload)["topologySpreadConstraints"]]
            assert zones == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
            assert all(
                matches(each["labelSelector"], labels(workload)) for each in pod(workload)["topologySpreadConstraints"]
            )
    assert len(budgets) == len(several) == 5


def test_a_drain_leaves_a_majority_of_servers_and_ends_where_there_is_one() -> None:
    (rabbitmq,) = of_kind(SERVERS, "RabbitmqCluster")
    held = [
        each["spec"] for each in of_kind(SERVERS, "PodDisruptionBudget")
        if each["spec"]["selector"] == {"matchLabels": {"app.kubernetes.io/name": rabbitmq["metadata"]["name"]}}
    ]  # fmt: skip
    assert [each["maxUnavailable"] for each in held] == [1]
    for directory in (SERVERS, "overlays/staging/dependencies"):
        (cluster,) = of_kind(directory, "Cluster")
        # CloudNativePG's own budget for a primary, which nothing can follow where it is alone
        assert cluster["spec"].get("enablePDB", True) == (cluster["spec"]["instances"] > 1)
    assert all(each["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for _, each in every() if each["kind"] == "PodDisruptionBudget")  # fmt: skip


def test_postgres_takes_the_connections_of_as_many_pods_as_there_may_be() -> None:
    (cluster,) = of_kind(SERVERS, "Cluster")
    most = {each["metadata"]["name"]: each["spec"]["maxReplicaCount"] for each in of_kind(PRODUCTION, "ScaledObject")}
    needed = 0
    for workload in workloads():
        command, name = main_container(workload)["command"], workload["metadata"]["name"]
        pods = most.get(name) or workload["spec"]["replicas"]
        surge = workload["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", 0)
        is_pool = command[0] == "celery" and "worker" in command
        each = (
            3 * (int(option(command, "--concurrency")) + 1)
            if is_pool
            else 2 * Settings.model_fields["pool_size"].default
        )
        needed += (pods + surge) * each
    parameters = cluster["spec"]["postgresql"]["parameters"]
    # some are the operator's and replicas'
    assert needed + 20 <= int(parameters["max_connections"]), needed
    source = (KUBERNETES / "dependencies" / "postgres.yaml").read_text()
    assert f" {needed}." in source
