"""Which addresses the doctor and every start refuse, and what the library's connections ask of TLS. Nothing connects."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, create_engine, event

from idempotency import IdempotentTask
from idempotency.application import settings_of
from idempotency.checks.broker import check_broker_settings
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Finding, Level
from idempotency.checks.startup import require_safe_setup
from idempotency.checks.tls import ANY_CERTIFICATE, ANY_HOST, PLAIN, UNKNOWN_OPTIONS, check_tls
from idempotency.errors import SettingsError
from idempotency.hosts import Allowed
from idempotency.queues import quorum_queue
from idempotency.settings import Settings
from idempotency.tls import amqp_options, redis_options
from tests.support.encrypted import ROOT

LOCAL = "postgresql+psycopg://shop:secret@127.0.0.1/shop"
AWAY = "postgresql+psycopg://shop:secret@db.example/shop"
VERIFIED = "verified, with the host's name"
HERE = "not needed, on this machine"


def findings(**conf: Any) -> dict[str, Finding]:
    app = Celery("shop", set_as_current=False)
    app.conf.update({"broker_url": "amqp://127.0.0.1", "idempotency_database_url": LOCAL} | conf)
    return {finding.subject.removesuffix(" TLS"): finding for finding in check_tls(app, settings_of(app))}


def check(finding: Finding, found: str) -> None:
    assert finding.found == found
    assert finding.level is (Level.OK if found in (VERIFIED, HERE) else Level.REFUSAL)
    assert "secret" not in str(finding)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        (LOCAL, HERE),
        (LOCAL.replace("127.0.0.1", "localhost"), HERE),
        (LOCAL.replace("127.0.0.1", "[::1]"), HERE),
        ("postgresql+psycopg:///shop", HERE),
        ("postgresql+psycopg:///shop?host=/run/postgresql", HERE),
        (AWAY, PLAIN),
        (f"{AWAY}?sslmode=disable", PLAIN),
        (f"{AWAY}?sslmode=prefer", PLAIN),
        (f"{AWAY}?sslmode=require", ANY_CERTIFICATE),
        (f"{AWAY}?sslmode=verify-ca", ANY_HOST),
        (f"{AWAY}?sslmode=verify-full", VERIFIED),
        (f"{AWAY}?sslrootcert=system", VERIFIED),
        (f"{AWAY}?hostaddr=127.0.0.1", HERE),
        (f"{LOCAL}?hostaddr=192.0.2.1", PLAIN),
        ("postgresql+psycopg:///shop?host=/run/postgresql,db.example", PLAIN),
        ("postgresql+psycopg:///shop?host=127.0.0.1:5432&host=db.example:5432", PLAIN),
        ("postgresql+psycopg:///?service=shop", PLAIN),
        ("postgresql+psycopg:///?service=shop&sslmode=verify-full", VERIFIED),
        (f"{LOCAL}?service=shop", PLAIN),  # its hostaddr would win
        (f"{LOCAL}?service=shop&hostaddr=127.0.0.1", HERE),
    ],
)
def test_postgres_off_this_machine_needs_verify_full(url: str, found: str) -> None:
    check(findings(idempotency_database_url=url)["idempotency_database_url"], found)


def test_what_libpq_reads_from_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    check(findings(idempotency_database_url=AWAY)["idempotency_database_url"], VERIFIED)
    monkeypatch.setenv("PGHOST", "db.example")
    monkeypatch.setenv("PGSSLMODE", "require")
    check(findings(idempotency_database_url="postgresql+psycopg:///shop")["idempotency_database_url"], ANY_CERTIFICATE)


@pytest.mark.parametrize(
    ("address", "named", "of_service", "found"),
    [
        ("?service=shop", None, "sslmode=disable", PLAIN),
        ("?service=shop&sslmode=verify-full", None, "sslmode=disable", VERIFIED),
        ("", "shop", "sslmode=disable", PLAIN),
        ("", "shop", "sslmode=require", ANY_CERTIFICATE),
        ("", "shop", "port=5433", VERIFIED),
        ("?sslmode=require", "shop", "sslmode=verify-full", ANY_CERTIFICATE),
    ],
)
def test_what_a_service_says_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, named: str | None, of_service: str, found: str
) -> None:
    file = tmp_path / "pg_service.conf"
    file.write_text(f"[shop]\n{of_service}\n")
    for name, value in {"PGSERVICEFILE": str(file), "PGSSLMODE": "verify-full", "PGSERVICE": named}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    check(findings(idempotency_database_url=f"{AWAY}{address}")["idempotency_database_url"], found)


def test_a_service_reaches_only_hosts_that_may_be_reached_in_plain_text() -> None:
    address = "postgresql+psycopg:///shop?host=db.example,other.example&service=shop"
    allowed = "db.example"
    found = findings(idempotency_plain_text_hosts=allowed, idempotency_database_url=address)
    check(found["idempotency_database_url"], PLAIN)
    found = findings(idempotency_plain_text_hosts=f"{allowed}, other.example", idempotency_database_url=address)
    assert found["idempotency_database_url"].level is Level.OK


def test_what_an_engine_of_your_own_asks_for_counts() -> None:
    def by_arguments(*args: Any, connect_args: dict[str, Any] | None = None, **options: Any) -> Engine:
        return create_engine(*args, connect_args={**(connect_args or {}), "sslmode": "verify-full"}, **options)

    def by_listener(*args: Any, **options: Any) -> Engine:
        engine = create_engine(*args, **options)
        event.listen(engine, "do_connect", lambda _dialect, _record, _args, given: given.update(host="db.example"))
        return engine

    engines = {"idempotency_database_url": AWAY, "idempotency_engine": by_arguments}
    check(findings(**engines)["idempotency_database_url"], VERIFIED)
    check(findings(idempotency_engine=by_listener)["idempotency_database_url"], PLAIN)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("redis://:secret@127.0.0.1:6379/0", HERE),
        ("unix:///run/redis.sock", HERE),
        ("redis://:secret@redis.example/0", PLAIN),
        ("rediss://:secret@redis.example/0", VERIFIED),
        ("rediss://:secret@redis.example/0?ssl_cert_reqs=none", ANY_CERTIFICATE),
        ("rediss://:secret@redis.example/0?ssl_cert_reqs=optional", ANY_CERTIFICATE),
        ("rediss://:secret@redis.example/0?ssl_check_hostname=false", ANY_HOST),
        ("rediss://:secret@redis.example/0?ssl_cert_reqs=required&ssl_check_hostname=true", VERIFIED),
    ],
)
def test_redis_off_this_machine_needs_a_verified_certificate(url: str, found: str) -> None:
    check(findings(idempotency_redis_url=url)["idempotency_redis_url"], found)


@pytest.mark.parametrize(
    ("url", "options", "found"),
    [
        ("amqp://127.0.0.1", None, HERE),
        (None, None, HERE),
        ("amqp://shop:secret@mq.example", None, PLAIN),
        ("amqps://shop:secret@mq.example", None, ANY_HOST),
        ("amqps://shop:secret@mq.example", True, ANY_HOST),
        ("amqps://shop:secret@mq.example", {"ca_certs": "ca.crt"}, ANY_HOST),
        ("amqps://shop:secret@mq.example", {"server_hostname": None}, VERIFIED),
        ("amqps://shop:secret@mq.example", {"server_hostname": "mq.example", "cert_reqs": ssl.CERT_REQUIRED}, VERIFIED),
        ("amqps://shop:secret@mq.example", {"server_hostname": None, "cert_reqs": ssl.CERT_NONE}, ANY_CERTIFICATE),
        ("amqp://shop:secret@mq.example", {"server_hostname": None}, VERIFIED),
        ("amqps://shop:secret@mq.example", {"context": {"cafile": "ca.crt"}}, ANY_HOST),
        ("amqps://shop:secret@mq.example", {"context": {"check_hostname": True}, "server_hostname": None}, VERIFIED),
        ("amqps://shop:secret@mq.example?ssl_ca_certs=ca.crt", None, UNKNOWN_OPTIONS),
        ("amqp://127.0.0.1;amqp://shop:secret@mq.example", None, PLAIN),
        (["amqp://127.0.0.1", "amqp://shop:secret@mq.example"], None, PLAIN),
        ("redis://:secret@redis.example/0", None, PLAIN),
        ("redis://:secret@redis.example/0", True, PLAIN),
        ("rediss://:secret@redis.example/0", None, ANY_CERTIFICATE),
        ("rediss://:secret@redis.example/0", {"ssl_cert_reqs": "required", "ssl_check_hostname": False}, ANY_HOST),
        ("rediss://:secret@redis.example/0", {"ssl_cert_reqs": "required", "ssl_check_hostname": True}, VERIFIED),
        ("redis+socket:///run/redis.sock", None, HERE),
        ("sentinel://127.0.0.1:26379;sentinel://redis.example:26379", None, PLAIN),
    ],
)
def test_a_broker_off_this_machine_needs_names_compared(url: Any, options: Any, found: str) -> None:
    check(findings(broker_url=url, broker_use_ssl=options)["broker_url"], found)


def test_an_option_that_kombu_does_not_know_is_no_address() -> None:
    app = Celery("shop", broker="rediss://:secret@redis.example/0?ssl_cert_reqs=secret", set_as_current=False)
    app.conf.idempotency_database_url = LOCAL
    assert "broker_url TLS" not in [finding.subject for finding in check_tls(app, settings_of(app))]
    _, (finding,) = check_broker_settings(app)
    assert str(finding) == "broker_url: not an address; correct it"


def test_brokers_for_reading_and_for_writing_are_both_looked_at() -> None:
    found = findings(broker_read_url="amqp://mq.example", broker_write_url="amqp://127.0.0.1")
    check(found["broker_read_url"], PLAIN)
    check(found["broker_write_url"], HERE)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("redis://:secret@127.0.0.1/0", HERE),
        ("redis://:secret@redis.example/0", PLAIN),
        ("rediss://:secret@redis.example/0", "not what Celery takes"),
        ("rediss://:secret@redis.example/0?ssl_cert_reqs=CERT_NONE", ANY_CERTIFICATE),
        ("rediss://:secret@redis.example/0?ssl_cert_reqs=required&ssl_check_hostname=true", VERIFIED),
        ("db+postgresql+psycopg://shop:secret@db.example/shop", PLAIN),
        ("db+postgresql+psycopg://shop:secret@db.example/shop?sslmode=verify-full", VERIFIED),
    ],
)
def test_a_result_backend_off_this_machine_is_looked_at_too(url: str, found: str) -> None:
    check(findings(result_backend=url)["result_backend"], found)


def test_hosts_of_a_private_network_are_named_and_always_reported() -> None:
    hosts = "db.example, 10.1.0.0/16"
    found = findings(
        idempotency_plain_text_hosts=hosts, idempotency_database_url=AWAY, idempotency_redis_url="redis://10.1.2.3/0"
    )
    named = "not required, by idempotency_plain_text_hosts"
    assert [found[f"idempotency_{name}_url"].found for name in ("database", "redis")] == [named, named]
    reported = found["idempotency_plain_text_hosts"]
    assert reported.level is Level.WARNING
    assert reported.found.startswith("db.example, 10.1.0.0/16: may be reached in plain text")
    check(findings(idempotency_plain_text_hosts=hosts, broker_url="amqp://10.2.0.1")["broker_url"], PLAIN)
    assert Settings(database_url=LOCAL).plain_text_hosts == ()
    assert Allowed.of(["db.example"]).has_host("DB.example")
    assert not Allowed.of(["db.example"]).has_host("db.example.org")


def test_no_worker_relay_or_beat_starts_with_plain_text_off_this_machine() -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.update(
        broker_url="amqp://shop:secret@mq.example",
        broker_transport_options={"confirm_publish": True},
        task_queues=[quorum_queue("shop")],
        task_default_queue="shop",
        accept_content=["json"],
        idempotency_database_url="postgresql+psycopg://shop:secret@127.0.0.1:1/shop",
    )

    @app.task(base=IdempotentTask, bind=True, name="pay", key="{id}")
    def pay(self: IdempotentTask, id: str) -> None:
        pass

    with pytest.raises(SystemExit) as refused:
        require_safe_setup(app)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"idempotency: refused to start: broker_url TLS: {PLAIN}; use amqps://")
    app.conf.idempotency_plain_text_hosts = ["mq.example"]
    assert require_safe_setup(app) == "connection refused"  # of the database, which prevents no start


def test_the_doctor_asks_nothing_of_a_server_whose_address_it_refuses() -> None:
    app = Celery("shop", broker="amqp://shop:secret@mq.invalid", set_as_current=False)
    app.conf.update(
        idempotency_database_url=AWAY.replace(".example", ".invalid"), idempotency_redis_url="redis://redis.invalid"
    )
    found = doctor(app)
    refused = {finding.subject for finding in found if finding.level is Level.REFUSAL and finding.found == PLAIN}
    assert refused == {"idempotency_database_url TLS", "idempotency_redis_url TLS", "broker_url TLS"}
    assert not any("unreachable" in finding.found for finding in found)
    app.conf.idempotency_plain_text_hosts = ["db.invalid", "redis.invalid", "mq.invalid"]
    assert len([finding for finding in doctor(app) if finding.found.startswith("unreachable: no such host")]) == 3


def test_names_are_compared_unless_the_application_says_otherwise() -> None:
    assert redis_options("rediss://redis.example") == {"ssl_check_hostname": True}
    assert redis_options("rediss://redis.example?ssl_cert_reqs=none") == {}
    assert redis_options("redis://redis.example") == {}
    assert amqp_options(False) is False
    assert amqp_options(True) == {"server_hostname": None}
    assert amqp_options({"server_hostname": "mq"}) == {"server_hostname": "mq"}
    assert amqp_options({"cert_reqs": ssl.CERT_NONE}) == {"cert_reqs": ssl.CERT_NONE}
    context = {"cafile": "ca.crt"}
    assert amqp_options({"context": context})["context"] == {"cafile": "ca.crt", "check_hostname": True}
    assert amqp_options({"context": {"check_hostname": False}})["context"] == {"check_hostname": False}
    assert context == {"cafile": "ca.crt"}


def test_an_issuer_of_identities_is_an_https_address() -> None:
    given = {"database_url": LOCAL, "oidc_audience": "shop", "oidc_keys": "https://login.example/keys"}
    Settings.read(given | {"oidc_issuer": "https://login.example"})
    with pytest.raises(SettingsError, match="oidc_issuer: must begin with https://, or with http:// on this machine"):
        Settings.read(given | {"oidc_issuer": "http://login.example"})


def test_the_examples_providers_need_https_off_this_machine() -> None:
    names = ("CARRIER_URL", "STRIPE_API_BASE")
    given = {"DATABASE_URL": LOCAL, "BROKER_URL": "amqp://127.0.0.1"} | dict.fromkeys(names, "http://secret.example")
    command = [sys.executable, "-c", "import celeryconfig"]
    shown = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False).stderr
    assert shown.count("must begin with https://, or with http:// on this machine") == 2
    assert all(name.lower() in shown for name in names)
    assert "secret.example" not in shown
