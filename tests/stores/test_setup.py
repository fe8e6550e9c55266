"""What the doctor and the start of a worker say of a store, and the ways to reach Redis."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
import redis
from celery import Celery

from idempotency import DeduplicatedTask, IdempotentTask, SettingsError
from idempotency.application import settings_of
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Finding, Level
from idempotency.checks.startup import check_stores_start
from idempotency.checks.stores import check_stores
from idempotency.store.answers import Claimed, Completed
from idempotency.stores.addresses import open_store
from idempotency.stores.dynamodb import DynamoDBStore
from idempotency.stores.redis import RedisStore
from idempotency.stores.store import Store, StoreAway
from services.redis import find_program
from tests.stores.conftest import REGION
from tests.stores.promises import promise
from tests.stores.scene import AgeingRedis, Scene, new_id
from tests.support.processes import eventually
from tests.support.proxy import Proxy


def application(store: str, **conf: Any) -> Celery:
    app = Celery("checked", set_as_current=False)
    app.conf.update(
        broker_url="amqp://127.0.0.1:1//",
        broker_transport_options={"confirm_publish": True},
        accept_content=["json"],
        idempotency_store=store,
        **conf,
    )

    @app.task(base=DeduplicatedTask, bind=True, name="t", key="{a}", lazy=False, shared=False)
    def task(self: DeduplicatedTask, a: str) -> None: ...

    app.finalize()
    for name in [name for name in app.tasks if name != "t" and not name.startswith("celery.")]:
        app.tasks.pop(name)  # of other tests' applications, which Celery shares
    return app


def refusals(app: Celery) -> dict[str, str]:
    return {each.subject: each.found for each in check_stores(app) if each.level is Level.REFUSAL}


def warnings(app: Celery) -> dict[str, str]:
    return {each.subject: each.found for each in check_stores(app) if each.level is Level.WARNING}


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as candidate:
        candidate.bind(("127.0.0.1", port))
        return True
    return False


@contextlib.contextmanager
def own_redis(directory: Path, *options: str) -> Iterator[str]:
    """A Redis with these options. Its address, without a scheme."""
    # A cluster needs another port, 10,000 above; both below the range for outgoing connections.
    port = next(each for each in random.sample(range(10_000, 22_000), 1000) if is_free(each) and is_free(each + 10_000))
    directory.mkdir(exist_ok=True)
    command = [str(find_program()), *options, "--port", str(port), "--dir", str(directory), "--bind", "127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(60)


# ---------------------------------------------------------------- Redis


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "volatile-ttl", "noeviction"])
def test_a_redis_that_may_drop_records_is_refused(redis_url: str, policy: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory-policy", policy)
        try:
            found = refusals(application(redis_url))
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    subject = "idempotency_store maxmemory-policy"
    assert found == ({} if policy == "noeviction" else {subject: f"{policy}, need noeviction"})


def test_a_worker_does_not_start_on_a_redis_that_drops_records(redis_url: str) -> None:
    app = application(redis_url)
    sender: Any = type("Worker", (), {"app": app})
    check_stores_start(sender)
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory-policy", "volatile-lru")
        try:
            with pytest.raises(SystemExit, match="refused to start: idempotency_store maxmemory-policy: volatile-lru"):
                check_stores_start(sender)
        finally:
            client.config_set("maxmemory-policy", "noeviction")


def test_what_a_restart_or_a_failover_forgets_is_said(tmp_path: Path) -> None:
    with own_redis(tmp_path / "first", "--save", "") as first:
        assert set(warnings(application(f"redis://{first}"))) == {"idempotency_store persistence"}
        host, port = first.split(":")
        with own_redis(tmp_path / "second", "--replicaof", host, port) as second:
            with redis.Redis(port=int(port)) as client:
                client.config_set("appendonly", "yes")
                deadline = time.monotonic() + 30
                while not client.info()["connected_slaves"] and time.monotonic() < deadline:
                    time.sleep(0.05)
            assert set(warnings(application(f"redis://{first}"))) == {"idempotency_store replication"}
            assert refusals(application(f"redis://{second}")) == {"idempotency_store": "role slave, need master"}


@promise("a record outlives a crash of its server", of="redis")
@pytest.mark.parametrize("appendonly", ["no", "yes"])
def test_a_redis_that_is_killed_has_its_records_only_in_its_file(tmp_path: Path, appendonly: str) -> None:
    """With `appendfsync everysec`, about the last second is missing even then."""
    options = ("--save", "", "--appendonly", appendonly, "--appendfsync", "always")
    id = new_id()
    for run in ("first", "after a kill"):
        with own_redis(tmp_path / "redis", *options) as address:
            store = RedisStore(f"redis://{address}", service="shop", timeout=5.0)
            if run == "first":
                Scene(store, AgeingRedis(store)).completed(id)
            else:
                assert (store.read(id) is None) is (appendonly == "no")
            store.close()


def test_a_store_that_does_not_answer_prevents_no_start(capsys: pytest.CaptureFixture[str]) -> None:
    app = application("redis://user:secret@127.0.0.1:1")
    sender: Any = type("Worker", (), {"app": app})
    check_stores_start(sender)
    said = capsys.readouterr().err
    assert "does not answer: Redis: ConnectionError; claims wait for it" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("address", "wrong"),
    [
        ("redis://redis.example/0", "plain text off this machine"),
        ("rediss://redis.example/0?ssl_cert_reqs=none", "TLS without verifying the certificate"),
        ("redis+cluster://redis.example", "plain text off this machine"),
        ("sentinel://10.0.0.1:26379,10.0.0.2:26379/mymaster", "plain text off this machine"),
    ],
)
def test_a_store_off_this_machine_needs_tls(address: str, wrong: str) -> None:
    assert refusals(application(address)) == {"idempotency_store TLS": wrong}
    assert not any("TLS" in each for each in refusals(application("redis://127.0.0.1:1")))


def test_the_doctor_of_an_application_without_postgres_asks_for_none(redis_url: str) -> None:
    findings = doctor(application(redis_url))
    assert not any("database" in str(each) for each in findings)
    assert any(each.subject == "tasks" and "1 deduplicated" in each.found for each in findings)


def test_what_protects_nothing_or_forgets_too_early_is_refused(redis_url: str) -> None:
    assert refusals(application(redis_url, idempotency_message_secrets="s" * 32)) == {
        "idempotency_message_secrets": "set, and nothing signs or checks messages where no task is an IdempotentTask"
    }
    app = application(redis_url)
    app.tasks["t"].__class__.retention_completed = 60.0
    assert refusals(app) == {"task t": "retention_completed=60 below redelivery_horizon=86400"}
    app.conf.broker_transport_options = {}
    assert refusals(app)["broker_transport_options"] == "confirm_publish off, need True"


def test_without_a_store_no_worker_starts() -> None:
    app = application("redis://127.0.0.1:1")
    app.conf.idempotency_store = None
    assert refusals(app) == {"task t": "idempotency_store: not set, and a DeduplicatedTask keeps its records there"}


def test_an_idempotent_task_beside_still_needs_its_database(redis_url: str) -> None:
    app = application(redis_url)

    @app.task(base=IdempotentTask, bind=True, name="u", key="{a}", lazy=False, shared=False)
    def task(self: IdempotentTask, a: str) -> None: ...

    found = [str(each) for each in doctor(app) if each.level is Level.REFUSAL]
    assert any(each.startswith("idempotency_database_url: not set") for each in found)


@pytest.mark.long
@pytest.mark.parametrize(
    "address",
    [
        "mysql://user:secret@host/db",
        "dynamodb://eu-west-1",
        "dynamodb://eu-west-1/a/b",
        "dynamodb://id:secret@eu-west-1/t",
        "sentinel://:secret@host/mymaster",
        "sentinel://:secret@host:26379",
        "redis://:secret@host:port/0",
        "",
    ],
)
def test_what_is_no_address_of_a_store_is_refused_without_being_shown(address: str) -> None:
    app = application(address)
    with pytest.raises(SettingsError, match=r"^idempotency_store: ") as refused:
        settings_of(app, needs_database=False)
    assert "secret" not in str(refused.value)
    assert all("secret" not in str(each) for each in check_stores(app))


def test_long_results_never_go_where_a_relay_deletes(redis_url: str, tmp_path: Path) -> None:
    app = application(redis_url, idempotency_large_results_at=f"file://{tmp_path}/relays")
    for there in (tmp_path / "relays", tmp_path / "relays" / "own", tmp_path):
        app.conf.idempotency_store_results_at = f"file://{there}"
        with pytest.raises(SettingsError, match="store_results_at must not be large_results_at"):
            settings_of(app, needs_database=False)
    app.conf.idempotency_store_results_at = f"file://{tmp_path}/own"
    assert settings_of(app, needs_database=False).store_results_at is not None


# ---------------------------------------------------------------- DynamoDB


@pytest.mark.long
def test_a_table_is_looked_at_with_its_key_and_its_time_to_live(dynamodb_address: str) -> None:
    assert refusals(application(dynamodb_address)) == {}
    assert warnings(application(dynamodb_address)) == {}
    missing = application(f"dynamodb://{REGION}/not-there")
    assert refusals(missing) == {"idempotency_store": "its table is not there"}

    client = boto3.client("dynamodb", region_name=REGION)
    for name, key in (("other", "name"), ("forever", "id")):
        client.create_table(
            TableName=name,
            AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"}],
            KeySchema=[{"AttributeName": key, "KeyType": "HASH"}],
            BillingMode="PAY_PER_REQUEST",
        )
    other = application(f"dynamodb://{REGION}/other")
    assert refusals(other) == {"idempotency_store": "its table has another key than 'id', a string"}
    forever = application(f"dynamodb://{REGION}/forever")
    assert set(warnings(forever)) == {"idempotency_store time to live"}
    wrong = {"Enabled": True, "AttributeName": "ttl"}
    client.update_time_to_live(TableName="forever", TimeToLiveSpecification=wrong)
    assert refusals(forever) == {"idempotency_store time to live": "by another attribute than 'expires_at'"}


def test_dynamodb_off_this_machine_needs_https(dynamodb_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", "http://dynamodb.example")
    assert refusals(application(dynamodb_address)) == {"idempotency_store TLS": "plain text off this machine"}


def test_an_item_stays_below_its_limit_with_the_longest_result(dynamodb_store: DynamoDBStore) -> None:
    id = new_id()
    held = dynamodb_store.claim(
        id, token="t" * 32, fingerprints=["v1:" + "f" * 64], holder="h" * 300, lease=60.0, keep=60.0
    )
    assert isinstance(held, Claimed)
    assert dynamodb_store.complete(held, "x" * dynamodb_store.room, retention=60.0)
    item = dynamodb_store._client.get_item(TableName=dynamodb_store._table, Key=dynamodb_store._key(id))["Item"]
    assert sum(len(name) + len(next(iter(value.values()))) for name, value in item.items()) < 400 * 1024


# ---------------------------------------------------------------- Sentinel, a cluster, lost answers


def works(store: Store) -> None:
    """One operation from its claim to a duplicate, and one that is dropped."""
    options: dict[str, Any] = {"fingerprints": ["v1:f"], "holder": "h", "lease": 60.0, "keep": 60.0}
    for _ in range(20):
        id = new_id()
        held = store.claim(id, token="one", **options)
        assert isinstance(held, Claimed)
        assert set(store.renew([held], lease=60.0, keep=60.0).values()) == {"held"}
        assert store.complete(held, "1", retention=60.0)
        assert store.claim(id, token="two", **options) == Completed("1")
        assert store.drop(id)
        assert store.read(id) is None


@pytest.mark.long
def test_all_keys_of_an_operation_are_in_one_slot_of_a_cluster(tmp_path: Path) -> None:
    with own_redis(tmp_path / "node", "--cluster-enabled", "yes") as address:
        with redis.Redis(port=int(address.split(":")[1])) as client:
            client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            deadline = time.monotonic() + 30
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO") and time.monotonic() < deadline:
                time.sleep(0.1)
        store = open_store(f"redis+cluster://{address}", service="shop", timeout=5.0)
        works(store)
        store.close()
        assert "idempotency_store replication" in warnings(application(f"redis+cluster://{address}"))


@pytest.mark.long
def test_every_primary_of_a_cluster_is_looked_at(tmp_path: Path) -> None:
    with (
        own_redis(tmp_path / "one", "--cluster-enabled", "yes") as one,
        own_redis(tmp_path / "two", "--cluster-enabled", "yes", "--maxmemory-policy", "volatile-ttl") as two,
    ):
        ports = [int(each.split(":")[1]) for each in (one, two)]
        with redis.Redis(port=ports[0]) as first, redis.Redis(port=ports[1]) as second:
            first.execute_command("CLUSTER", "ADDSLOTS", *range(8192))
            second.execute_command("CLUSTER", "ADDSLOTS", *range(8192, 16384))
            second.execute_command("CLUSTER", "SET-CONFIG-EPOCH", 2)
            first.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[1])

            def is_whole() -> bool:
                return all(b"cluster_state:ok" in each.execute_command("CLUSTER", "INFO") for each in (first, second))

            eventually(is_whole, what="a cluster of two")
        refused = refusals(application(f"redis+cluster://{one}"))
        assert refused == {f"idempotency_store port {ports[1]} maxmemory-policy": "volatile-ttl, need noeviction"}


def test_a_primary_is_found_through_sentinel(tmp_path: Path) -> None:
    with own_redis(tmp_path / "primary") as primary:
        host, port = primary.split(":")
        (tmp_path / "sentinel").mkdir()
        config = tmp_path / "sentinel" / "sentinel.conf"
        config.write_text(f"sentinel monitor shop {host} {port} 1\n")
        with own_redis_sentinel(tmp_path / "sentinel", config) as sentinel:
            store = open_store(f"sentinel://127.0.0.1:1,{sentinel}/shop/0", service="shop", timeout=5.0)
            works(store)
            store.close()


@contextlib.contextmanager
def own_redis_sentinel(directory: Path, config: Path) -> Iterator[str]:
    with own_redis(directory, str(config), "--sentinel") as address:
        yield address


@pytest.mark.parametrize("what", ["claim", "complete", "fail", "release"])
def test_an_answer_that_redis_has_lost_is_asked_for_again(redis_url: str, what: str) -> None:
    """The client sends the script once more, on another connection: it finds what it has done."""
    port = urlsplit(redis_url).port or 6379
    with Proxy("127.0.0.1", port) as proxy:
        store = RedisStore(redis_url.replace(f":{port}", f":{proxy.port}"), service="shop", timeout=5.0)
        scene = Scene(store, AgeingRedis(store))
        if what == "claim":
            store.read(new_id())
            proxy.cut_reply_to(b"EVAL")
            assert scene.started().attempts == 1
        else:
            held = scene.started()
            proxy.cut_reply_to(b"EVAL")
            change: Callable[[], bool] = {
                "complete": lambda: store.complete(held, "1", retention=60.0),
                "fail": lambda: store.fail(held, '{"code": "c", "message": "m"}', retention=60.0),
                "release": lambda: store.release(held, delay=0.0, keep=60.0, give_back=True),
            }[what]
            assert change()
            if what == "release":
                assert scene.started(held.id).attempts == 1
        assert proxy.cuts == 1
        store.close()


def test_a_redis_that_is_away_is_said_without_its_address() -> None:
    store = RedisStore("redis://user:secret@127.0.0.1:1", service="shop", timeout=1.0)
    with pytest.raises(StoreAway) as away:
        store.read(new_id())
    assert str(away.value) == "Redis: ConnectionError"


def test_findings_of_a_task_with_its_own_store_name_it(redis_url: str) -> None:
    app = application(redis_url)
    app.tasks["t"].__class__.store = "redis://127.0.0.1:1"
    found: list[Finding] = check_stores(app)
    assert any(each.subject == "store of t" and "does not answer" in each.found for each in found)
