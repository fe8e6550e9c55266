"""Who reaches whom: network policies, services, what Prometheus scrapes and KEDA asks."""

from __future__ import annotations

import copy
import inspect
import ipaddress
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from idempotency.store.overview import Snapshot
from idempotency.upkeep import backlog
from scripts import kubernetes
from tests.deploy.test_processes import LOGINS, PRODUCTION, SERVERS, consumers, workloads
from tests.support import monitoring
from tests.support.documents import ROOT
from tests.support.manifests import (
    Object,
    build,
    containers,
    environment,
    labels,
    main_container,
    matches,
    named,
    of_kind,
    pod,
)  # fmt: skip

# Pods that operators make, by the label that they document or are given, and their ports.
MADE = {
    "postgres": ({"cnpg.io/cluster": "postgres"}, {5432, 8000, 9187}),
    "rabbitmq": ({"app.kubernetes.io/name": "rabbitmq"}, {4369, 5671, 15671, 15691, 25672, 35672}),
}
Pods = dict[str, tuple[dict[str, str], set[Any]]]


def together(overlay: str = "production") -> list[Object]:
    """All that is in the namespace: processes, the Job, servers, and Flower, which staging has."""
    flower = [each for each in build("overlays/staging") if each["metadata"]["name"].startswith("flower")]
    own = [each for part in ("", "/dependencies", "/migrate") for each in build(f"overlays/{overlay}{part}")]
    return own if overlay == "staging" else [*own, *flower]


@cache
def pods(overlay: str) -> Pods:
    """The labels and the ports of every kind of pod, by name."""
    found: Pods = dict(MADE)
    for each in together(overlay):
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            ports = [port for container in containers(each) for port in container.get("ports", [])]
            open_ = {port["name"] for port in ports} | {port["containerPort"] for port in ports}
            found[each["metadata"]["name"]] = (labels(each), open_)
        elif each["kind"] in ("RedisReplication", "RedisSentinel"):
            own, port = each["metadata"]["labels"], 6379 if each["kind"] == "RedisReplication" else 26379
            found[own["app.kubernetes.io/component"]] = (own, {port})
    return found


def policies(overlay: str = "production") -> list[Object]:
    return [each for each in together(overlay) if each["kind"] == "NetworkPolicy"]


def selected(selector: Object, overlay: str = "production") -> set[str]:
    return {name for name, (found, _) in pods(overlay).items() if matches(selector, found)}


def rules(policy: Object, direction: str) -> list[Object]:
    found: list[Object] = policy["spec"].get(direction) or []
    return found


def may(source: str, target: str, port: Any, overlay: str = "production") -> bool:
    """Whether policies let a pod of one kind reach one of another at a port."""
    there = policies(overlay)
    return _lets(there, "egress", "to", source, target, port, overlay) and _lets(
        there, "ingress", "from", target, source, port, overlay
    )


def _lets(there: list[Object], direction: str, side: str, own: str, other: str, port: Any, overlay: str) -> bool:
    for policy in there:
        if own in selected(policy["spec"]["podSelector"], overlay):
            for rule in rules(policy, direction):
                peers = [peer["podSelector"] for peer in rule.get(side, []) if set(peer) == {"podSelector"}]
                if port in [each["port"] for each in rule["ports"]] and any(
                    other in selected(peer, overlay) for peer in peers
                ):
                    return True
    return False


def test_nothing_is_open_by_itself() -> None:
    first = named(policies(), "nothing")["spec"]
    assert first == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_every_policy_is_about_pods_that_are_there_and_ports_that_they_have() -> None:
    everything = pods("production")
    for policy in policies():
        name, own = policy["metadata"]["name"], selected(policy["spec"]["podSelector"])
        assert own, name
        for direction, side in (("egress", "to"), ("ingress", "from")):
            for rule in rules(policy, direction):
                assert rule["ports"], name
                peers = [peer for peer in rule.get(side, []) if set(peer) == {"podSelector"}]
                others = {other for peer in peers for other in selected(peer["podSelector"])}
                assert all(selected(peer["podSelector"]) for peer in peers), name
                held = own if direction == "ingress" else others
                for port in rule["ports"]:
                    assert not held or any(port["port"] in everything[each][1] for each in held), (name, port)


@pytest.mark.parametrize("overlay", ["production", "staging"])
def test_each_process_reaches_its_servers_and_no_other(overlay: str) -> None:
    redis = [("redis", 6379)] + ([("sentinel", 26379)] if overlay == "production" else [])
    found = {
        (source, server)
        for source in (*LOGINS, "migrate", "flower")
        for server, port in (("postgres", 5432), ("rabbitmq", 5671), *redis)
        if may(source, server, port, overlay)
    }
    wanted = {("migrate", "postgres"), ("flower", "rabbitmq")}
    for name, (_, _, has_hints) in LOGINS.items():
        wanted |= {(name, "postgres"), (name, "rabbitmq")}
        wanted |= {(name, server) for server, _ in redis} if has_hints else set()
    assert found == wanted


def test_redis_and_sentinels_reach_each_other_and_the_operator_both() -> None:
    wanted = {("redis", "redis"), ("sentinel", "redis"), ("sentinel", "sentinel")}
    ports = {"redis": 6379, "sentinel": 26379}
    assert {(a, b) for a in ports for b in ports if may(a, b, ports[b])} == wanted
    for name, port in ports.items():
        (rule,) = rules(named(policies(), name), "ingress")
        assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ot-operators"}}} in rule["from"]
        assert rule["ports"] == [{"protocol": "TCP", "port": port}]


@pytest.mark.parametrize("overlay", ["production", "staging"])
def test_servers_look_up_names_and_the_job_reaches_them_before_the_processes_are_there(overlay: str) -> None:
    servers = of_kind(f"overlays/{overlay}/dependencies", "NetworkPolicy")
    for name in (*MADE, "redis"):
        own = [each for each in servers if name in selected(each["spec"]["podSelector"], overlay)]
        ports = [port for policy in own for rule in rules(policy, "egress") for port in rule["ports"]]
        assert {"protocol": "UDP", "port": 53} in ports, name
    assert _lets(servers, "egress", "to", "migrate", "postgres", 5432, overlay)
    assert _lets(servers, "ingress", "from", "postgres", "migrate", 5432, overlay)
    assert named(servers, "nothing")["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_no_process_reaches_another_one() -> None:
    processes = [*LOGINS, "migrate", "flower"]
    ports = {port for name in processes for port in pods("production")[name][1]}
    assert [(a, b) for a in processes for b in processes for port in ports if may(a, b, port)] == []


def test_what_is_refused_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may("relay", "postgres", 5432)
    less = copy.deepcopy(policies())
    (values,) = named(less, "to-postgres")["spec"]["podSelector"]["matchExpressions"]
    values["values"].remove("relay")
    monkeypatch.setattr(f"{__name__}.policies", lambda _: less)
    assert not may("relay", "postgres", 5432)


def test_who_leaves_the_cluster_reaches_public_addresses_alone() -> None:
    leaving: dict[str, set[int]] = {}
    for policy in policies():
        for rule in rules(policy, "egress"):
            blocks = [peer["ipBlock"] for peer in rule.get("to", []) if "ipBlock" in peer]
            if not blocks:
                continue
            assert {block["cidr"] for block in blocks} == {"0.0.0.0/0", "::/0"}
            shut = [ipaddress.ip_network(each) for block in blocks for each in block["except"]]
            for private in ("10.1.2.3", "172.20.0.1", "192.168.1.1", "127.0.0.1", "169.254.169.254", "100.64.0.1",
                            "fd00::1", "fe80::1", "::1", "::ffff:10.0.0.1"):  # fmt: skip
                assert any(ipaddress.ip_address(private) in each for each in shut if each.version == ipaddress.ip_address(private).version)  # fmt: skip
            for name in selected(policy["spec"]["podSelector"]):
                leaving[name] = leaving.get(name, set()) | {port["port"] for port in rule["ports"]}
    calling, web = {443, 465, 587}, {443}
    assert leaving == {
        **dict.fromkeys(("worker", "maintenance"), calling),
        **dict.fromkeys(("webhooks", "relay", "admin", "web", "api"), web),
    }


def test_every_service_leads_to_pods_and_a_port_of_theirs() -> None:
    for service in [each for each in together() if each["kind"] == "Service"]:
        to = selected({"matchLabels": service["spec"]["selector"]})
        assert to == {service["metadata"]["name"]}
        assert all(
            port["targetPort"] in pods("production")[name][1]
            for name in to
            for port in service["spec"].get("ports", [])
        )


def test_addresses_are_the_names_of_services_and_of_certificates() -> None:
    certificates = {each["metadata"]["name"]: each["spec"]["dnsNames"] for each in of_kind(SERVERS, "Certificate")
                    if "dnsNames" in each["spec"]}  # fmt: skip
    hosts = set()
    for workload in workloads():
        for variable, value in environment(main_container(workload)).items():
            if variable in ("DATABASE_URL", "BROKER_URL", "REDIS_URL"):
                hosts.add(re.sub(r".*@([\w.-]+):.*", r"\1", value))
    assert hosts == {"postgres-rw", "rabbitmq", "hints-sentinel"}
    for host in (*hosts, "rabbitmq.shop.svc"):
        assert host in certificates[host.partition(".")[0].removesuffix("-rw").removesuffix("-sentinel")]
    for kind, name in (("Cluster", "postgres"), ("RabbitmqCluster", "rabbitmq")):
        assert named(of_kind(SERVERS, kind), name)
    cluster = named(of_kind(SERVERS, "Cluster"), "postgres")["spec"]
    assert cluster["instances"] == 3
    assert cluster["postgresql"]["synchronous"] == {"method": "any", "number": 1, "dataDurability": "required"}


# ---------------------------------------------------------------- Prometheus


def test_the_rules_are_those_of_prometheus() -> None:
    (rule,) = of_kind(PRODUCTION, "PrometheusRule")
    written = yaml.safe_load(kubernetes.TARGET.read_text())
    assert written == kubernetes.rules(), "run make kubernetes"
    assert rule["spec"] == written["spec"]
    source = yaml.safe_load((ROOT / "monitoring" / "rules.yml").read_text())

    def without_start(groups: Any) -> Any:
        found = copy.deepcopy(groups)
        for each in (each for group in found for each in group["rules"]):
            each["annotations"].pop("start", None)
        return found

    assert without_start(rule["spec"]["groups"]) == without_start(source["groups"])
    assert "yourapp" not in yaml.safe_dump(
        [r["annotations"].get("start") for g in rule["spec"]["groups"] for r in g["rules"]]
    )


def test_what_a_rule_starts_again_is_there() -> None:
    names = {each["metadata"]["name"] for each in together()}
    for start in kubernetes.STARTS.values():
        found = re.findall(r"deployment/(\w+)|(?:cluster|rabbitmqcluster) (\w+)", start)
        assert found or "$labels.host" in start
        assert {name for pair in found for name in pair if name} <= names


def test_prometheus_scrapes_every_pod_that_counts_and_the_backlog_as_the_job_of_the_rules() -> None:
    jobs: dict[str, set[str]] = {}
    for monitor in of_kind(PRODUCTION, "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        (relabel,) = endpoint["relabelings"]
        of = {name for name in selected(monitor["spec"]["selector"]) if endpoint["port"] in pods("production")[name][1]}
        assert of == selected(monitor["spec"]["selector"])
        assert relabel["targetLabel"] == "job"
        jobs[relabel["replacement"]] = of
    # NothingScraped would be silent if anything else had the rules' job
    assert jobs == {
        "idempotency": {"metrics"},
        "idempotency-processes": {"worker", "webhooks", "maintenance", "relay"},
        "idempotency-http": {"api", "admin"},
    }
    assert set(re.findall(r'job="([\w-]+)"', kubernetes.SOURCE.read_text())) == {"idempotency"}


def test_every_pod_that_is_scraped_may_be() -> None:
    for monitor in of_kind(PRODUCTION, "PodMonitor"):
        port = monitor["spec"]["podMetricsEndpoints"][0]["port"]
        names = selected(monitor["spec"]["selector"])
        assert names
        for name in names:
            # a policy may have the port's name, or its number
            (number,) = {
                each["containerPort"]
                for workload in workloads()
                if workload["metadata"]["name"] == name
                for container in containers(workload)
                for each in container.get("ports", ())
                if each["name"] == port
            }
            assert any(
                name in selected(policy["spec"]["podSelector"])
                and {port, number} & {each["port"] for each in rule["ports"]}
                and {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
                in rule["from"]
                for policy in policies()
                for rule in rules(policy, "ingress")
            ), name


def test_what_counts_together_shares_a_directory() -> None:
    for workload in workloads():
        found = [each for each in containers(workload) if "PROMETHEUS_MULTIPROC_DIR" in environment(each)]
        directories = {environment(each)["PROMETHEUS_MULTIPROC_DIR"] for each in found}
        counts = labels(workload).get("shop/counts") == "yes"
        assert (len(found), len(directories)) == ((2, 1) if counts else (1, 1) if found else (0, 0))
        if counts:
            # it starts first, and goes on until the process has ended
            (sidecar,) = pod(workload)["initContainers"]
            assert sidecar["restartPolicy"] == "Always"


# ---------------------------------------------------------------- KEDA


def test_workers_are_scaled_by_their_queues_and_by_a_figure_that_is_served() -> None:
    served = {f"idempotency_{name}" for name in re.findall(r'"(\w+)"', inspect.getsource(backlog))}
    scaled = of_kind(PRODUCTION, "ScaledObject")
    assert {each["metadata"]["name"] for each in scaled} == set(consumers()) - {"maintenance"}
    for each in scaled:
        name, spec = each["metadata"]["name"], each["spec"]
        assert spec["scaleTargetRef"] == {"name": name}
        assert "replicas" not in named(workloads(), name)["spec"], "each apply would undo what KEDA has chosen"
        assert 2 <= spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
        *lengths, age = spec["triggers"]
        assert [trigger["metadata"]["queueName"] for trigger in lengths] == consumers()[name]
        query = age["metadata"]["query"]
        found = re.findall(r'(\w+)\{job="idempotency", queue=~"([\w|]+)"\}', query)
        assert {metric for metric, _ in found} == {"idempotency_accepted_oldest_seconds", "idempotency_accepted"}
        assert {metric for metric, _ in found} <= served
        assert all(queues.split("|") == consumers()[name] for _, queues in found)
        for trigger in lengths:
            assert trigger["metadata"]["host"].startswith("amqps://rabbitmq.shop.svc:5671/")
            assert (
                trigger["authenticationRef"]["name"]
                == of_kind(PRODUCTION, "TriggerAuthentication")[0]["metadata"]["name"]
            )


def test_the_page_gives_the_figures_that_workers_are_scaled_by() -> None:
    page = " ".join((ROOT / "docs" / "kubernetes.md").read_text().split())
    specs = {each["metadata"]["name"]: each["spec"] for each in of_kind(PRODUCTION, "ScaledObject")}
    worker, webhooks = (
        f"{specs[name]['minReplicaCount']}–{specs[name]['maxReplicaCount']}" for name in ("worker", "webhooks")
    )
    assert f"by KEDA, {worker} and {webhooks}" in page
    lengths = {
        name: {trigger["metadata"]["value"] for trigger in spec["triggers"][:-1]} for name, spec in specs.items()
    }
    (of_worker,), (of_webhooks,) = lengths["worker"], lengths["webhooks"]
    assert f"{of_worker} messages a pod (`webhooks`: {of_webhooks})" in page
    (age,) = {spec["triggers"][-1]["metadata"]["threshold"] for spec in specs.values()}
    assert f"one pod for each {age} s that the oldest accepted operation has been due" in page


@monitoring.needs_prometheus
@pytest.mark.parametrize(("oldest", "wanted"), [(None, 0), (75, 75)])
def test_the_age_is_a_figure_as_long_as_the_backlog_is_scraped(tmp_path: Path, oldest: int | None, wanted: int) -> None:
    """KEDA takes no answer for a failure: then it would never end the workers of a burst."""
    snapshot = Snapshot()
    for queue in [each for name in consumers() for each in consumers()[name]]:
        snapshot.queue(queue).ready = 0
    for queue in ("refunds", "webhooks"):
        snapshot.queue(queue).oldest_accepted_seconds = oldest
        snapshot.queue(queue).accepted = 0 if oldest is None else 3
    series = [
        {"series": f'{each.name}{{job="idempotency", queue="{each.labels["queue"]}"}}', "values": str(each.value)}
        for metric in backlog._queues(snapshot)
        for each in metric.samples
    ]
    assert len(series) > 12
    asked = [each["spec"]["triggers"][-1]["metadata"]["query"] for each in of_kind(PRODUCTION, "ScaledObject")]
    tests = [
        {
            "interval": "15s",
            "input_series": given,
            "promql_expr_test": [{"expr": query, "eval_time": "0s", "exp_samples": samples} for query in asked],
        }
        for given, samples in ((series, [{"labels": "{}", "value": wanted}]), ([], []))
    ]
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": [], "tests": tests}))
    program = shutil.which("promtool")
    assert program is not None
    done = subprocess.run([program, "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
