"""Addresses of several servers, as they are read and checked. Nothing connects."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from idempotency.application import settings_of
from idempotency.broker.connections import brokers
from idempotency.checks.broker import require_broker_address
from idempotency.checks.doctor import check_configuration
from idempotency.checks.findings import Level
from idempotency.checks.tls import ANY_CERTIFICATE, ANY_HOST, PLAIN, check_tls
from idempotency.errors import SettingsError
from idempotency.sentinel import client_of_primary
from idempotency.setting_values import database_at, sentinels
from idempotency.settings import Settings

DATABASE = "postgresql+psycopg://shop:hush@/shop"


def configured(**conf: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update({"broker_url": "amqp://127.0.0.1", "idempotency_database_url": f"{DATABASE}?host=127.0.0.1"} | conf)
    return app


@pytest.mark.parametrize(
    ("address", "hosts"),
    [
        (f"{DATABASE}?host=one:5432&host=two:5433", [("one", 5432), ("two", 5433)]),
        (f"{DATABASE}?host=one,two&port=5432,5433", [("one", 5432), ("two", 5433)]),
        ("postgresql+psycopg://shop:hush@one,two/shop", [("one", 5432), ("two", 5432)]),
        ("postgresql+psycopg://shop:hush@one:6432/shop", [("one", 6432)]),
        ("postgresql+psycopg://shop:hush@[::1]:6432/shop", [("::1", 6432)]),
        (f"{DATABASE}?host=::1,::2&port=5432,5433", [("::1", 5432), ("::2", 5433)]),
        (f"{DATABASE}?host=one&hostaddr=10.0.0.1", [("10.0.0.1", 5432)]),
        (f"{DATABASE}?host=/run/postgresql", [("/run/postgresql", 5432)]),
        (DATABASE, [(None, 5432)]),
    ],
)
def test_the_hosts_of_an_address_are_found(address: str, hosts: list[tuple[str | None, int]]) -> None:
    assert database_at(address) == ("shop", hosts)


def test_an_address_as_libpq_has_it_is_refused_with_the_right_one() -> None:
    with pytest.raises(SettingsError, match="several hosts go behind the name: /shop") as error:
        Settings.read({"database_url": "postgresql+psycopg://shop:hush@one:5432,two:5432/shop"})
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    "behind",
    [
        "host=one,two&port=6432",
        "host=[::1]:5432&host=[::2]:5432",
        "host=[::1]:5432",
        "host=one:5432,two:5432",
        "host=one:5432&host=two:5432&port=5432",
    ],
)
def test_hosts_and_ports_that_cannot_be_told_apart_are_refused_with_what_can_be(behind: str) -> None:
    with pytest.raises(
        SettingsError, match=r"idempotency_database_url: .*\?host=one,two&port=5432,5432, and ::1"
    ) as error:
        Settings.read({"database_url": f"{DATABASE}?{behind}"})
    assert "hush" not in str(error.value)


def test_sentinels_by_numbers_of_version_6() -> None:
    hosts, _, _, _ = sentinels("[::1]:26379,10.0.0.1:26380/hints")
    assert hosts == [("::1", 26379), ("10.0.0.1", 26380)]


def test_a_single_host_may_be_asked_for_a_standby_if_there_is_one() -> None:
    app = configured(idempotency_database_url=f"{DATABASE}?host=127.0.0.1:1&target_session_attrs=prefer-standby")
    assert not [each for each in check_configuration(app, settings_of(app)) if each.subject == "database hosts"]


@pytest.mark.parametrize("target", ["standby", "read-only"])
def test_a_single_host_must_not_be_asked_for_a_standby(target: str) -> None:
    app = configured(idempotency_database_url=f"{DATABASE}?host=127.0.0.1:1&target_session_attrs={target}")
    refused = [each for each in check_configuration(app, settings_of(app)) if each.subject == "database hosts"]
    assert [(each.level, each.found) for each in refused] == [
        (Level.REFUSAL, f"target_session_attrs={target}, need read-write")
    ]


def test_hosts_of_the_environment_need_a_primary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "127.0.0.1,127.0.0.1")
    monkeypatch.setenv("PGPORT", "1,2")
    app = configured(idempotency_database_url=DATABASE)
    refused = [each for each in check_configuration(app, settings_of(app)) if each.subject == "database hosts"]
    assert [each.found for each in refused] == ["target_session_attrs=any, need read-write"]


@pytest.mark.parametrize("target", ["", "&target_session_attrs=any", "&target_session_attrs=prefer-standby"])
def test_several_hosts_need_a_primary(target: str) -> None:
    app = configured(idempotency_database_url=f"{DATABASE}?host=127.0.0.1:1&host=127.0.0.1:2{target}")
    refused = [each for each in check_configuration(app, settings_of(app)) if each.subject == "database hosts"]
    assert [each.level for each in refused] == [Level.REFUSAL]
    assert "need read-write" in str(refused[0])


def test_what_the_environment_says_of_the_target_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGTARGETSESSIONATTRS", "read-write")
    app = configured(idempotency_database_url=f"{DATABASE}?host=127.0.0.1:1&host=127.0.0.1:2")
    assert not [each for each in check_configuration(app, settings_of(app)) if each.subject == "database hosts"]


@pytest.mark.parametrize(
    "address",
    [
        f"{DATABASE}?host=127.0.0.1:1&host=127.0.0.1:2&target_session_attrs=read-write",
        f"{DATABASE}?host=127.0.0.1:1&host=127.0.0.1:2&target_session_attrs=primary",
        f"{DATABASE}?host=127.0.0.1:1",
        f"{DATABASE}?host=/run/postgresql",
    ],
)
def test_a_single_host_or_a_primary_of_several_is_accepted(address: str) -> None:
    app = configured(idempotency_database_url=address)
    assert not [each for each in check_configuration(app, settings_of(app)) if each.subject == "database hosts"]


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("sentinel://:hush@127.0.0.1:26379,127.0.0.1:26380/hints", "not needed, on this machine"),
        ("sentinel://:hush@127.0.0.1:26379,s2.example:26379/hints", PLAIN),
        ("sentinels://:hush@s1.example:26379,s2.example:26379/hints", "verified, with the host's name"),
        ("sentinels://:hush@s1.example:26379/hints/1?ssl_ca_certs=/a/ca.crt", "verified, with the host's name"),
        ("sentinels://:hush@s1.example:26379/hints?ssl_check_hostname=false", ANY_HOST),
        ("sentinels://:hush@s1.example:26379/hints?ssl_cert_reqs=none", ANY_CERTIFICATE),
    ],
)
def test_each_sentinel_off_this_machine_needs_tls(address: str, found: str) -> None:
    app = configured(idempotency_redis_url=address)
    checked = {each.subject: each for each in check_tls(app, settings_of(app))}
    assert checked["idempotency_redis_url TLS"].found == found
    assert "hush" not in str(checked)


def test_an_address_of_sentinels_names_their_ports_and_the_primary() -> None:
    with pytest.raises(SettingsError, match="must be sentinel://") as error:
        Settings.read({"database_url": DATABASE, "redis_url": "sentinel://:hush@s1.example"})
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("sentinel://:hush@s1.example:26379/hints?ssl_ca_certs=/a/ca.crt", "may have options only as sentinels://"),
        ("sentinels://:hush@s1.example:26379/hints?socket_timeout=3", "only those of TLS"),
        ("sentinels://:hush@s1.example:26379/hints?ssl_min_version=hush", "ssl_min_version"),
    ],
)
def test_other_options_of_sentinels_are_refused(address: str, said: str) -> None:
    for name in ("redis_url", "store"):
        with pytest.raises(SettingsError, match=said) as error:
            Settings.read({"database_url": DATABASE, name: address})
        assert "hush" not in str(error.value)


def test_options_of_tls_are_those_of_the_sentinels_and_of_the_primary() -> None:
    with client_of_primary("sentinels://:hush@s1.example:26379/hints?ssl_ca_certs=/a/ca.crt") as client:
        pool: Any = client.connection_pool
        of_primary = pool.connection_kwargs
        of_sentinel = pool.sentinel_manager.sentinels[0].connection_pool.connection_kwargs
    for given in (of_primary, of_sentinel):
        assert given["ssl_ca_certs"] == "/a/ca.crt"
        assert given["ssl_check_hostname"] is True
    assert pool.service_name == "hints"


@pytest.mark.parametrize("as_list", [False, True])
def test_each_broker_off_this_machine_needs_tls(as_list: bool) -> None:
    urls = ["amqp://shop:hush@127.0.0.1", "amqp://shop:hush@mq.example"]
    app = configured(broker_url=urls if as_list else ";".join(urls))
    assert brokers(app.connection_for_write) == urls
    checked = {each.subject: each for each in check_tls(app, settings_of(app))}
    assert checked["broker_url TLS"].found == PLAIN
    assert "hush" not in str(checked)


def test_one_broker_is_the_one_that_the_application_names() -> None:
    assert brokers(configured().connection_for_write) == [None]


def test_brokers_of_two_virtual_hosts_are_refused() -> None:
    app = configured(broker_url="amqp://one//;amqp://two/other")
    refused = [each for each in check_configuration(app, settings_of(app)) if each.level is Level.REFUSAL]
    assert ("broker_url", "names several virtual hosts") in [
        (each.subject, each.found.partition(":")[0]) for each in refused
    ]
    with pytest.raises(SettingsError, match="broker_url: names several virtual hosts"):
        require_broker_address(app)


@pytest.mark.parametrize(
    "address",
    ["amqp://one;amqp://two//;amqp://three/%2F", "sentinel://one:1/3;sentinel://two:2", "amqp://u:p@one/shop;two"],
)
def test_brokers_of_one_virtual_host_are_not(address: str) -> None:
    require_broker_address(configured(broker_url=address))


def test_a_broker_to_read_from_at_another_virtual_host_is_a_warning() -> None:
    app = configured(broker_read_url="amqp://127.0.0.1/one", broker_write_url="amqp://127.0.0.1/other")
    found = [each for each in check_configuration(app, settings_of(app)) if each.subject == "broker_read_url"]
    assert [(each.level, each.found) for each in found] == [
        (Level.WARNING, "another virtual host than that of broker_write_url")
    ]
    app = configured(broker_read_url="amqp://127.0.0.1/one", broker_write_url="amqp://localhost/one")
    assert not [each for each in check_configuration(app, settings_of(app)) if each.subject == "broker_read_url"]
