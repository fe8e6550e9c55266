"""Redis behind Sentinel with the users, certificates and addresses of the manifests, on real servers.

They are configured as the operator's agent does it (its release 0.26), which is not at hand: by name, over TLS alone, and with
the default user. All are `localhost` here, and their certificate has this name and no address.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.exceptions import ConnectionError as Closed
from redis.retry import Retry

from idempotency.attempt.hints import Hint, Hints
from idempotency.checks.redis import check_redis
from idempotency.settings import Settings
from idempotency.wire.keys import OperationId
from scripts import kubernetes_secrets
from services.server import Server
from tests.deploy.test_processes import PRODUCTION, SERVERS, workloads
from tests.deploy.test_starting import OWNER, make_secrets
from tests.support.encrypted import TlsRedis
from tests.support.manifests import Object, environment, main_container, matches, named, of_kind
from tests.support.processes import eventually

HOST = "localhost"
ONCE = Retry(NoBackoff(), 0)
USAGES = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH, "client auth": ExtendedKeyUsageOID.CLIENT_AUTH}


def replication() -> Object:
    return named(of_kind(SERVERS, "RedisReplication"), "hints")


def watching() -> Object:
    return named(of_kind(SERVERS, "RedisSentinel"), "hints")


@pytest.fixture(scope="module")
def made() -> Any:
    """What the Secrets have, by name and key."""
    return {each["metadata"]["name"]: each["stringData"] for each in json.loads(make_secrets().stdout)["items"]}


def certificates(directory: Path) -> Path:
    """ca.crt, tls.crt and tls.key, with the usages of the manifest's certificate and `HOST` as the only name."""
    (manifest,) = [each["spec"] for each in of_kind(SERVERS, "Certificate") if each["metadata"]["name"] == "hints"]
    key, signer = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    own, authority = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("hints", "shop"))

    def signed(subject: x509.Name, public: Any, *extensions: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder(authority, subject, public, x509.random_serial_number())
        builder = builder.not_valid_before(datetime.now(UTC) - timedelta(minutes=5))
        builder = builder.not_valid_after(datetime.now(UTC) + timedelta(days=1))
        for each in extensions:
            builder = builder.add_extension(each, critical=False)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    usages = [USAGES[each] for each in manifest["usages"] if each in USAGES]
    (directory / "ca.crt").write_bytes(
        signed(authority, signer.public_key(), x509.BasicConstraints(ca=True, path_length=0))
    )
    names = x509.SubjectAlternativeName([x509.DNSName(HOST)])
    (directory / "tls.crt").write_bytes(signed(own, key.public_key(), names, x509.ExtendedKeyUsage(usages)))
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "tls.key").write_bytes(key.private_bytes(*private))
    return directory


class Node(TlsRedis):
    """One of the two Redis, or, with `watches`, a Sentinel of the first."""

    def __init__(self, directory: Path, tls: Path, made: Any, watches: Node | None = None) -> None:
        self._made, self._watches = made, watches
        super().__init__(directory, tls)

    def client(self) -> Redis:
        """As the operator."""
        options: dict[str, Any] = {"ssl_ca_certs": str(self.certificates / "ca.crt"), "ssl_check_hostname": True}
        return Redis(HOST, self.port, password=self._operator, ssl=True, decode_responses=True, **options)

    @property
    def _operator(self) -> str:
        return str(self._made["redis-operator"]["password"])

    @property
    def is_primary(self) -> bool:
        with self.client() as client:
            found: Any = client.info("replication")
            return str(found["role"]) == "master"

    def _command(self) -> Sequence[str | Path]:
        config, users = self.directory / "own.conf", self.directory / "user.acl"
        (key,) = (
            replication()["spec"]["acl"]["secret"]["items"]
            if self._watches is None
            else watching()["spec"]["volumeMount"]["volume"][0]["secret"]["items"]
        )
        users.write_text(self._made["redis-users"][key["key"]])
        if not config.exists():
            config.write_text("\n".join([*self._both(users), *(self._of_sentinel() if self._watches else self._of_redis())]) + "\n")  # fmt: skip
        return [self.program(), config, *(["--sentinel"] if self._watches else [])]

    def _both(self, users: Path) -> list[str]:
        tls = self.certificates
        return [
            f"bind 127.0.0.1 -::1\nport 0\ntls-port {self.port}\nprotected-mode yes",
            f"masterauth {self._operator}\nrequirepass {self._operator}\naclfile {users}",
            f"tls-cert-file {tls}/tls.crt\ntls-key-file {tls}/tls.key\ntls-ca-cert-file {tls}/ca.crt",
            "tls-auth-clients optional\ntls-replication yes",
        ]

    def _of_redis(self) -> list[str]:
        more = named(of_kind(SERVERS, "ConfigMap"), replication()["spec"]["redisConfig"]["additionalRedisConfig"])
        (self.directory / "announced.conf").write_text(f"replica-announce-ip {HOST}\n")
        return [more["data"]["redis-additional.conf"].replace("/data", str(self.directory))]

    def _of_sentinel(self) -> list[str]:
        said = watching()["spec"]["redisSentinelConfig"]
        name = said["masterGroupName"]
        return [
            # with itself, until the operator says which it is
            f"sentinel monitor {name} {HOST} {self.port} {said['quorum']}",
            f"sentinel down-after-milliseconds {name} {said['downAfterMilliseconds']}",
            f"sentinel failover-timeout {name} {said['failoverTimeout']}",
            f"sentinel resolve-hostnames {said['resolveHostnames']}",
            f"sentinel announce-hostnames {said['announceHostnames']}",
            f"sentinel auth-pass {name} {self._operator}\nsentinel announce-ip {HOST}\ndir {self.directory}",
        ]

    def _check(self) -> None:
        with self.client() as client:
            client.ping()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, made: Any) -> Iterator[tuple[list[Node], list[Node]]]:
    """Two Redis, and three Sentinels that know which of them is the primary."""
    directory = tmp_path_factory.mktemp("hints")
    tls = certificates(directory)
    nodes = [Node(directory / f"redis-{i}", tls, made) for i in range(2)]
    sentinels = [Node(directory / f"sentinel-{i}", tls, made, watches=nodes[0]) for i in range(3)]
    everyone: list[Server] = [*nodes, *sentinels]
    try:
        for each in everyone:
            each.start()
        said = watching()["spec"]["redisSentinelConfig"]
        with nodes[1].client() as client:
            client.execute_command("REPLICAOF", HOST, nodes[0].port)
        eventually(lambda: replicas(nodes[0]) == 1, what="a replica")
        for each in sentinels:
            with each.client() as client:
                ask: Callable[..., Any] = client.execute_command
                ask("SENTINEL", "REMOVE", said["masterGroupName"])
                ask("SENTINEL", "MONITOR", said["masterGroupName"], HOST, nodes[0].port, said["quorum"])
                ask("SENTINEL", "SET", said["masterGroupName"], "auth-pass", made["redis-operator"]["password"])
                for option, given in (("down-after-milliseconds", "downAfterMilliseconds"), ("failover-timeout", "failoverTimeout")):  # fmt: skip
                    ask("SENTINEL", "SET", said["masterGroupName"], option, said[given])
        yield nodes, sentinels
    finally:
        for each in everyone:
            each.discard()


def replicas(node: Node) -> int:
    with node.client() as client:
        found: Any = client.info("replication")
        return int("online" in str(found.get("slave0")))


def address(sentinels: list[Node], made: Any) -> str:
    """The address of the worker's pod, with these Sentinels instead of their Service."""
    value = environment(main_container(named(workloads(), "worker")))["REDIS_URL"]
    service = value.partition("@")[2].partition("/")[0]
    here = {
        ":secret@": f":{made['redis-hints']['password']}@",
        service: ",".join(f"{HOST}:{each.port}" for each in sentinels),
        "/certificates/ca.crt": str(sentinels[0].certificates / "ca.crt"),
    }
    for old, new in here.items():
        assert value.count(old) == 1
        value = value.replace(old, new)
    return value


@pytest.mark.long
def test_hints_and_the_doctor_follow_the_primary_by_its_name(running: tuple[list[Node], list[Node]], made: Any) -> None:
    nodes, sentinels = running
    url = address(sentinels, made)
    given = Settings.read({"database_url": "postgresql+psycopg://127.0.0.1/shop", "redis_url": url})
    assert given.redis_url is not None

    def doctor() -> list[str]:
        return [str(each) for each in check_redis(given.redis_url)]  # type: ignore[arg-type]

    eventually(lambda: "redis sentinels: 3, of which 2 must agree; 1 replicas" in doctor(), what="three that agree")
    assert any("master, noeviction" in each for each in doctor())
    hints = Hints(url, owner=OWNER, lease=60, timeout=2.0, pause=0.0)

    def works() -> bool:
        id = OperationId("default", "task", os.urandom(8).hex())
        return hints.take(id, "a" * 32, "v1:00") is Hint.FREE and hints.take(id, "b" * 32, "v1:00") is Hint.HELD

    assert works()
    name = watching()["spec"]["redisSentinelConfig"]["masterGroupName"]
    with sentinels[0].client() as client:
        client.execute_command("SENTINEL", "FAILOVER", name)
        eventually(lambda: nodes[1].is_primary, what="a new primary")
        # a name, that the certificate has: an address would be refused
        eventually(
            lambda: client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name) == [HOST, str(nodes[1].port)],
            what="its name",
        )
    eventually(lambda: not nodes[0].is_primary, what="the former one follows")
    hints = hints.with_own_connections()
    eventually(works, what="hints at the new primary")


@pytest.mark.long
def test_the_user_of_hints_may_do_nothing_else_and_nobody_logs_in_without_a_password(
    running: tuple[list[Node], list[Node]], made: Any
) -> None:
    nodes, sentinels = running
    options: dict[str, Any] = {"ssl": True, "retry": ONCE, "ssl_ca_certs": str(nodes[0].certificates / "ca.crt")}
    user = {"username": kubernetes_secrets.HINTS, "password": made["redis-hints"]["password"]}
    name = watching()["spec"]["redisSentinelConfig"]["masterGroupName"]
    for node, refused in (
        (nodes[0], ("CONFIG", "GET", "save")),
        (nodes[0], ("GET", "other")),
        (sentinels[0], ("SENTINEL", "FAILOVER", name)),
        (sentinels[0], ("SENTINEL", "SET", name, "quorum", "1")),
        (sentinels[0], ("SENTINEL", "CONFIG", "GET", "*")),
    ):
        with Redis(HOST, node.port, **options, **user) as client, pytest.raises(NoPermissionError):
            client.execute_command(*refused)
        with Redis(HOST, node.port, **options) as client, pytest.raises(AuthenticationError):
            client.ping()


def test_a_replica_announces_a_name_that_the_certificate_has(tmp_path: Path) -> None:
    spec = replication()["spec"]
    (script,) = spec["initContainer"]["args"]
    fields = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in spec["initContainer"]["env"]}
    assert fields == {"POD": "metadata.name", "NAMESPACE": "metadata.namespace"}
    (tmp_path / "redis.conf").touch()
    script = script.replace("/etc/redis", str(tmp_path)).replace("/data", str(tmp_path))

    def run() -> int:
        variables = os.environ | {"POD": "hints-2", "NAMESPACE": "shop"}
        return subprocess.run([*spec["initContainer"]["command"], script], env=variables, check=False).returncode

    assert run() == 0
    written = (tmp_path / "announced.conf").read_text()
    assert written == "replica-announce-ip hints-2.hints-headless.shop.svc.cluster.local\n"
    (certificate,) = [each["spec"] for each in of_kind(SERVERS, "Certificate") if each["metadata"]["name"] == "hints"]
    for each in (written.split()[1], "hints-sentinel-0.hints-sentinel-headless.shop.svc.cluster.local"):
        assert f"*.{each.partition('.')[2]}" in certificate["dnsNames"]
    # an operator without its gate has written no configuration: the pod does not start
    (tmp_path / "redis.conf").unlink()
    assert run() != 0
    assert watching()["spec"]["initContainer"]["command"] == ["test", "-f", "/etc/redis/sentinel.conf"]


def test_a_sentinel_announces_a_name_of_its_own() -> None:
    variables = sorted(watching()["spec"]["env"], key=lambda each: str(each["name"]))
    known = {"metadata.name": "hints-sentinel-1", "metadata.namespace": "shop"}
    values = [
        {"name": each["name"], "value": known[each["valueFrom"]["fieldRef"]["fieldPath"]]} if "valueFrom" in each else each
        for each in variables
    ]  # fmt: skip
    found = environment({"env": values})
    assert found["IP"] == "hints-sentinel-1.hints-sentinel-headless.shop.svc.cluster.local"
    (mount,) = watching()["spec"]["volumeMount"]["mountPath"]
    (volume,) = watching()["spec"]["volumeMount"]["volume"]
    assert found["ACL_FILE_PATH"] == f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}"
    assert found["ACL_MODE"] == "true"


def test_the_sentinels_address_is_that_of_the_processes() -> None:
    said = watching()["spec"]["redisSentinelConfig"]
    assert said["redisReplicationName"] == replication()["metadata"]["name"]
    assert said["resolveHostnames"] == said["announceHostnames"] == "yes"
    assert int(said["quorum"]) * 2 > watching()["spec"]["clusterSize"] >= 3
    service = f"{watching()['metadata']['name']}-sentinel"
    for each in workloads(PRODUCTION):
        if url := environment(main_container(each)).get("REDIS_URL"):
            assert f"@{service}:26379/{said['masterGroupName']}?" in url, each["metadata"]["name"]
    # of staging, one Redis
    for each in workloads("overlays/staging"):
        if url := environment(main_container(each)).get("REDIS_URL"):
            assert url.startswith("rediss://idempotency_hints:secret@redis:6379/0?"), each["metadata"]["name"]


def test_budgets_and_zones_are_of_the_pods_that_the_operator_makes() -> None:
    budgets = of_kind(SERVERS, "PodDisruptionBudget")
    # which it would delete
    assert {each["metadata"]["name"] for each in budgets}.isdisjoint({"hints-sentinel", "hints-replication"})
    for each in (replication(), watching()):
        own = each["metadata"]["labels"]
        (held,) = [budget for budget in budgets if matches(budget["spec"]["selector"], own)]
        assert held["spec"]["maxUnavailable"] == 1
        spread = each["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        terms = [term["podAffinityTerm"] for term in spread]
        assert [term["topologyKey"] for term in terms] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
        assert all(matches(term["labelSelector"], own) for term in terms)


@pytest.mark.long
def test_names_are_compared(running: tuple[list[Node], list[Node]]) -> None:
    node = running[0][0]
    options: dict[str, Any] = {"ssl_ca_certs": str(node.certificates / "ca.crt"), "ssl_check_hostname": True}
    with Redis("127.0.0.1", node.port, ssl=True, retry=ONCE, **options) as client, pytest.raises(Closed, match="IP address mismatch"):  # fmt: skip
        client.ping()
