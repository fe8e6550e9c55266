"""The rules of monitoring/: by promtool, and in a real Prometheus that scrapes a real `idempotency metrics`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from celery import Celery
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Connection, make_url, text

from idempotency.observe import metrics
from services.prometheus import Prometheus
from tests.integration.test_metrics import endpoint
from tests.support import operations as op
from tests.support.monitoring import BOARD, DIRECTORY, RULES, Counting, alerts, needs_prometheus, prometheus, shortened
from tests.support.processes import eventually
from tests.support.proxy import Proxy

pytestmark = needs_prometheus
ALERTS = alerts()
# Of a silent process, and of one that lives all the while.
SIGN = """INSERT INTO idempotency.processes (kind, name, host, pid, service, version, started_at, seen_at)
          VALUES (:kind, :name, 'h', 7, 'bank', '1', now(), clock_timestamp() + make_interval(secs => :from_now))"""
LETTER = """INSERT INTO idempotency.dead_letters (source, consumer_service, reason, payload)
            SELECT 'broker', 'bank', :reason, '' FROM generate_series(1, :many)"""


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=DIRECTORY, capture_output=True, text=True, timeout=60)


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    done = promtool("check", "rules", RULES.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout
    (tmp_path / "short.yml").write_text(shortened(RULES.read_text()))
    assert promtool("check", "rules", str(tmp_path / "short.yml")).returncode == 0


@pytest.mark.long
def test_promtool_finds_each_alert_silent_and_firing() -> None:
    done = promtool("test", "rules", "rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    tests = yaml.safe_load((DIRECTORY / "rules_test.yml").read_text())["tests"]
    seen = {(each["alertname"], bool(each["exp_alerts"])) for test in tests for each in test.get("alert_rule_test", ())}
    assert seen == {(name, fires) for name in ALERTS for fires in (False, True)} - {("Watchdog", False)}


def test_a_rule_that_is_wrong_is_noticed(tmp_path: Path) -> None:
    wrong = RULES.read_text().replace("idempotency_queue_consumers == 0", "idempotency_queue_consumers == 1")
    (tmp_path / "rules.yml").write_text(wrong)
    tests = yaml.safe_load((DIRECTORY / "rules_test.yml").read_text())
    tests["tests"] = [test for test in tests["tests"] if test["name"] == "NoConsumers"]
    (tmp_path / "rules_test.yml").write_text(yaml.safe_dump(tests))
    done = promtool("test", "rules", str(tmp_path / "rules_test.yml"))
    assert done.returncode == 1
    assert "alertname: NoConsumers" in done.stdout + done.stderr


def test_every_rule_says_what_to_do() -> None:
    for name, rule in ALERTS.items():
        assert set(rule["labels"]) >= {"severity"}, name
        assert rule["labels"]["severity"] in ("critical", "warning", "info", "none"), name
        assert set(rule["annotations"]) >= {"summary", "runbook", "command"}, name


class World:
    """What the rules look at: the tables, the counters, and the way to the servers."""

    def __init__(
        self,
        connection: Connection,
        counting: Counting,
        server: Prometheus,
        database: Proxy,
        broker: Proxy,
        queue: str,
        url: str,
    ) -> None:
        self.connection, self.counting, self.server = connection, counting, server
        self.database, self.broker, self.queue = database, broker, queue
        self.url = url
        self.name = connection.exec_driver_sql("SELECT current_database()").scalar_one()

    def sql(self, statement: str, **fields: Any) -> None:
        self.connection.execute(text(statement), fields)

    def counted(self, counter: str, amount: float, *labels: str) -> None:
        """Count something that was 0 when it was first seen: a rate needs two values."""
        self.counting.count(counter, 0, *labels)
        series = {"fenced": "fenced_writes", "waiting": "claims_waiting"}.get(counter, counter)
        name = f"idempotency_{'outbox_' if counter == 'stuck' else ''}{series}_total"
        wanted = set(labels)
        eventually(
            lambda: any(wanted <= {*each["metric"].values()} for each in self.server.query(name)),
            what=f"{name} is seen",
        )
        self.counting.count(counter, amount, *labels)


@contextmanager
def written(world: World, statement: str, *cleaned: str, **fields: Any) -> Iterator[None]:
    world.sql(statement, **fields)
    yield
    for each in cleaned:
        world.sql(each)


NO_LETTERS = "DELETE FROM idempotency.dead_letters"
NO_ROWS = ("DELETE FROM idempotency.outbox", "DELETE FROM idempotency.records")


@contextmanager
def row(world: World, changed: str) -> Iterator[None]:
    """A row of the outbox, and a change of it."""
    held = op.early(world.connection, queue=world.queue)
    world.sql("DELETE FROM idempotency.records")
    world.sql(f"UPDATE idempotency.outbox SET {changed} WHERE key = :key", key=held.id.key)
    yield
    for each in NO_ROWS:
        world.sql(each)


@contextmanager
def not_kept(world: World) -> Iterator[None]:
    held = op.early(world.connection)
    error = """UPDATE idempotency.records SET error = '{"code": "ResultNotKept", "message": "full"}' WHERE key = :key"""
    world.sql(error, key=held.id.key)
    yield
    for each in NO_ROWS:
        world.sql(each)


@contextmanager
def refusing(proxy: Proxy) -> Iterator[None]:
    proxy.refuse()
    proxy.reset()
    yield
    proxy.heal()


@contextmanager
def counts(world: World, counter: str, amount: float, *labels: str) -> Iterator[None]:
    world.counted(counter, amount, *labels)
    yield


@contextmanager
def read_only(world: World) -> Iterator[None]:
    change = f"ALTER DATABASE {world.name} {{}} default_transaction_read_only"
    world.sql(change.format("SET") + " = on")
    yield
    # the connection of the test is older than the setting, and writes
    world.sql(change.format("RESET"))


LONG_AGO = "clock_timestamp() - interval '400 s'"
# How each alert is brought about, and what makes it end.
CAUSES: dict[str, Callable[[World], AbstractContextManager[None]]] = {
    "SilentProcess": lambda w: written(
        w, SIGN, "DELETE FROM idempotency.processes WHERE name = 'x'", kind="beat", name="x", from_now=-90
    ),
    "NoWorker": lambda w: written(
        w,
        "DELETE FROM idempotency.processes WHERE kind = 'worker'",
        SIGN.replace(":kind", "'worker'").replace(":name", "'w'").replace(":from_now", "3600"),
    ),
    "NoRelayProcess": lambda w: written(
        w,
        "DELETE FROM idempotency.processes WHERE kind = 'relay'",
        SIGN.replace(":kind", "'relay'").replace(":name", "'r'").replace(":from_now", "3600"),
    ),
    "DatabaseDown": lambda w: refusing(w.database),
    "BrokerDown": lambda w: refusing(w.broker),
    "DatabaseReadOnly": read_only,
    "WaitingForDatabase": lambda w: counts(w, "waiting", 99, "bank.deposit", "OperationalError"),
    "NoConsumers": lambda w: row(w, "available_at = clock_timestamp()"),
    "AcceptedOld": lambda w: row(w, f"available_at = {LONG_AGO}"),
    "OutboxOld": lambda w: row(w, f"available_at = {LONG_AGO}"),
    "RowsWithoutRelay": lambda w: row(w, "available_at = clock_timestamp(), service = 'mail'"),
    "UnnamedRows": lambda w: row(w, "available_at = clock_timestamp(), service = NULL"),
    "ResultsNotKept": not_kept,
    "UnknownEffects": lambda w: written(w, LETTER, NO_LETTERS, reason="effect_unknown", many=1),
    "DeadLetters": lambda w: written(w, LETTER, NO_LETTERS, reason="envelope", many=1),
    "TooManyDeadLetters": lambda w: written(w, LETTER, NO_LETTERS, reason="envelope", many=101),
    "OutboxFailed": lambda w: row(w, "status = 'failed', last_error = 'too large'"),
    "OutboxStuck": lambda w: counts(w, "stuck", 9),
    "Failures": lambda w: counts(w, "failed", 99, "bank.deposit", "declined"),
    "LeasesLost": lambda w: counts(w, "leases_lost", 99, "bank.deposit"),
    "SetAside": lambda w: counts(w, "set_aside", 9, "purge"),
    "AlertsUnsent": lambda w: counts(w, "alerts_unsent", 9),
    "WebhooksFailing": lambda w: counts(w, "webhooks", 9, "timeout"),
    "StreamStopped": lambda w: written(
        w,
        """INSERT INTO idempotency.stream_positions (service, consumer, topic, partition, fence, stopped)
           VALUES ('bank', 's', 't', 0, 1, 'refused')""",
        "DELETE FROM idempotency.stream_positions",
    ),
    "WebhookDisabled": lambda w: written(
        w,
        """INSERT INTO idempotency.webhook_endpoints (id, tenant, service, url, events, status, disabled_because)
           VALUES ('ep_1', 'default', 'bank', 'https://a.example', ARRAY['*'], 'disabled', 'gone')""",
        "DELETE FROM idempotency.webhook_endpoints",
    ),
}
# These have tests of their own below.
APART = {"Watchdog", "NothingScraped", "NoRelay"}


@pytest.fixture
def world(bank: Celery, connection: Connection, environment: dict[str, str], tmp_path: Path) -> Iterator[World]:
    """All is well: a worker and a relay live, nothing waits, and Prometheus sees it."""
    database, broker = make_url(environment["DATABASE_URL"]), make_url(environment["BROKER_URL"])
    directory = tmp_path / "counters"
    with ExitStack() as stack:
        ways = [stack.enter_context(Proxy(each.host or "", each.port or 0)) for each in (database, broker)]
        through = {
            name: each.set(host="127.0.0.1", port=way.port).render_as_string(hide_password=False)
            for name, each, way in zip(("DATABASE_URL", "BROKER_URL"), (database, broker), ways, strict=True)
        }
        for kind, name in (("worker", "w"), ("relay", "r")):
            connection.execute(text(SIGN), {"kind": kind, "name": name, "from_now": 3600})
        counting = stack.enter_context(Counting(environment, directory))
        counting.count("webhooks", 0, "2xx")
        url = stack.enter_context(endpoint(directory, "-A", "tests.support.bank", **(environment | through)))
        labels = {"runbooks": "https://wiki.example/runbooks", "environment": "test"}
        server = stack.enter_context(prometheus(tmp_path / "prometheus", url, external_labels=labels))
        eventually(lambda: set(server.firing()) == {"Watchdog"}, what="all is well", timeout=30)
        yield World(connection, counting, server, ways[0], ways[1], bank.conf.task_default_queue, url)


def assert_fires_and_clears(world: World, name: str) -> None:
    server = world.server
    with CAUSES[name](world):
        (alert, *_) = eventually(lambda: server.firing().get(name), what=f"{name} fires", timeout=30)
        assert "{{" not in str(alert["annotations"])
        page = re.fullmatch(r"https://wiki\.example/runbooks/([a-z_]+)\.md", alert["annotations"]["runbook"])
        assert page is not None
    eventually(lambda: name not in server.firing(), what=f"{name} is over", timeout=60)


@pytest.mark.long
@pytest.mark.plain
def test_an_alarm_fires_in_prometheus_and_clears(world: World) -> None:
    assert_fires_and_clears(world, "NoConsumers")
    rules = world.server.rules()
    assert {rule["name"] for rule in rules} == set(ALERTS)
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []


@pytest.mark.long
@pytest.mark.plain
@pytest.mark.parametrize("name", CAUSES)
def test_each_alarm_fires_in_prometheus_and_clears(world: World, name: str) -> None:
    assert_fires_and_clears(world, name)


def exported(url: str) -> dict[str, set[str]]:
    """What the library exports: the names of series, with their labels."""
    found: dict[str, set[str]] = {}
    metrics.prepare()
    for made in vars(metrics._metrics()).values():
        histogram = [f"{made._name}_{part}" for part in ("bucket", "sum", "count")]
        names = histogram if made._type == "histogram" else [f"{made._name}_total"]
        found |= {name: {*made._labelnames, "le"} for name in names}
    page = httpx.get(url, timeout=10).raise_for_status().text
    for family in text_string_to_metric_families(page):
        if family.type == "gauge":
            found[family.name] = {label for sample in family.samples for label in sample.labels}
    return found


def queries() -> list[str]:
    """The queries of the board, as Grafana sends them."""
    board = json.loads(BOARD.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(found) > 40
    return [query.replace("$__rate_interval", "1m") for query in found]


def test_the_board_and_the_rules_ask_for_what_there_is(world: World) -> None:
    for query in queries():
        world.server.query(query)
    with pytest.raises(HTTPError):
        world.server.query("sum by (task (rate(idempotency_completed_total[1m]))")
    known = exported(world.url)
    asked = {*queries(), *(rule["expr"] for rule in ALERTS.values())}
    used = {name for query in asked for name in re.findall(r"idempotency_\w+", query)}
    assert used - set(known) == set()
    # the sums of histograms, and when the next attempt is due
    assert {name for name in set(known) - used if not name.endswith(("_sum", "_count"))} == {
        "idempotency_released_next_due_seconds"
    }
    for query in asked:
        names = re.findall(r"idempotency_\w+", query)
        labels = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", query))))
        labels |= set(re.findall(r"(\w+)!?=~?\"", query))
        labels -= {"job", "instance"}  # which Prometheus adds to every series
        # labels of gauges without a series now are not known here
        possible = {label for name in names for label in known[name]}
        assert labels <= possible or not possible, query


def test_every_panel_has_its_place() -> None:
    board = json.loads(BOARD.read_text())
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_every_alert_is_brought_about_by_a_test() -> None:
    assert set(CAUSES) | APART == set(ALERTS)


@pytest.mark.long
@pytest.mark.plain
def test_rows_without_any_relay_are_an_alarm(world: World) -> None:
    with CAUSES["NoRelayProcess"](world), CAUSES["NoConsumers"](world):
        eventually(lambda: "NoRelay" in world.server.firing(), what="NoRelay fires", timeout=30)
    eventually(lambda: set(world.server.firing()) == {"Watchdog"}, what="all is well", timeout=30)


@pytest.mark.long
@pytest.mark.plain
def test_without_figures_one_alarm_says_so(bank: Celery, environment: dict[str, str], tmp_path: Path) -> None:
    with (
        endpoint(tmp_path, "-A", "tests.support.bank", **environment) as url,
        prometheus(tmp_path / "prometheus", url) as server,
    ):
        eventually(lambda: "NoWorker" in server.firing(), what="it is scraped")
        assert "NothingScraped" not in server.firing()
    with prometheus(tmp_path / "again", url) as server:  # the endpoint is gone
        eventually(lambda: set(server.firing()) == {"NothingScraped", "Watchdog"}, what="nothing is scraped")
