"""Every secret and every row is a canary: real processes run into every trouble, and nothing that they show has one in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import redis
from sqlalchemy import Engine, make_url, text

from services.server import free_port
from tests.support.alert_receiver import Receiver, receiving
from tests.support.processes import eventually

pytest.importorskip("flower")

ROW = f"row-{uuid4().hex}"
TABLES = "CREATE TABLE people (email text CONSTRAINT one_person UNIQUE, age int CONSTRAINT is_born CHECK (age >= 0))"
# Of a secret that is compared or signed with, and never of an address.
PLAIN = (
    "STRIPE_API_KEY",
    "STRIPE_WEBHOOK_SECRETS",
    "PAYMENT_WEBHOOK_SECRETS",
    "IDEMPOTENCY_MESSAGE_SECRETS",
    "IDEMPOTENCY_TOKEN",
)


def canary() -> str:
    return f"canary-{uuid4().hex}"


@contextmanager
def running(environment: Mapping[str, str], log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait(60)


def operator(environment: Mapping[str, str], what: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.vault_operator", what],
        env=environment, input=ROW, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def command_lines() -> str:
    """Of all processes of this machine, as every user of it sees them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(found)


@pytest.mark.long
@pytest.mark.direct
def test_no_secret_and_no_row_is_shown_anywhere(environment: dict[str, str], engine: Engine, tmp_path: Path) -> None:
    with receiving() as receiver:
        _look_everywhere(environment, engine, receiver, tmp_path)


def _look_everywhere(environment: dict[str, str], engine: Engine, receiver: Receiver, tmp_path: Path) -> None:
    secrets = {name: canary() for name in PLAIN}
    hidden = {name: canary() for name in ("webhook", "mail", "flower")}
    addresses = {name: environment[name] for name in ("DATABASE_URL", "REDIS_URL", "BROKER_URL")}
    passwords = {name: str(make_url(address).password) for name, address in addresses.items()}
    canaries = {**secrets, **hidden, **passwords, "row": ROW}
    assert all(len(value) >= 16 for value in canaries.values())
    flower, metrics = free_port(), free_port()
    given = environment | secrets | {
        "VAULT_QUEUE": f"vault-{uuid4().hex[:8]}",
        "SMTP_URL": f"smtps://shop:{hidden['mail']}@127.0.0.1:1",
        "IDEMPOTENCY_ALERT_WEBHOOK_URL": receiver.url + f"/{hidden['webhook']}?token={hidden['webhook']}",
        "IDEMPOTENCY_ALERT_INTERVAL": "1",
        "IDEMPOTENCY_REPORT_SMTP_URL": f"smtps://shop:{hidden['mail']}@127.0.0.1:1",
        "IDEMPOTENCY_REPORT_MAIL_TO": "ops@bank.example",
        "FLOWER_BASIC_AUTH": f"ops:{hidden['flower']}",
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "counted"),
        "CELERY_APP": "tests.support.vault",
    }  # fmt: skip
    (tmp_path / "counted").mkdir()
    with engine.begin() as connection:
        connection.execute(text(TABLES))
    seen: dict[str, str] = {}
    logs = {name: tmp_path / f"{name}.log" for name in ("worker", "relay", "beat", "flower", "metrics")}
    commands = {
        "worker": ("celery", "-A", "tests.support.vault", "worker", "--loglevel=DEBUG", "--concurrency=2", "-E"),
        "relay": ("idempotency.cli", "relay"),
        "beat": ("celery", "-A", "tests.support.vault", "beat", "--loglevel=DEBUG", f"--schedule={tmp_path / 'beat'}"),
        "flower": ("celery", "-A", "tests.support.vault", "flower", "--address=127.0.0.1", f"--port={flower}"),
        "metrics": ("idempotency.cli", "metrics", f"--port={metrics}", "-A", "tests.support.vault"),
    }
    with ExitStack() as stack:
        for name, command in commands.items():
            stack.enter_context(running(given, logs[name], *command))
        eventually(lambda: " ready." in logs["worker"].read_text(), timeout=90, what="the worker")
        pages = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{flower}", auth=("ops", hidden["flower"]), timeout=30)
        )
        eventually(lambda: answers(pages, "/api/workers?refresh=1"), timeout=60, what="flower")
        seen["act"] = operator(given, "act")
        eventually(lambda: ended(engine) == 8, timeout=60, what=f"eight ends; {seen['act'][-2000:]}")
        eventually(lambda: letters(engine) >= 8, timeout=60, what="the letters")
        eventually(lambda: receiver.texts, timeout=60, what="an alert")
        seen["commands"] = operator(given, "look")
        (worker,) = pages.get("/api/workers").json()
        paths = [
            "/",
            "/tasks",
            "/workers",
            "/broker",
            f"/worker/{worker}",
            "/api/workers?refresh=1",
            "/api/tasks",
            "/metrics",
        ]
        tasks = pages.get("/api/tasks").json()
        paths += [path for id in tasks for path in (f"/task/{id}", f"/api/task/info/{id}")]
        seen |= {path: pages.get(path).text for path in paths}
        seen["/metrics of ours"] = httpx.get(f"http://127.0.0.1:{metrics}/metrics", timeout=30).text
        seen["ps"] = command_lines()
    wrong = {name: address.replace(passwords[name], canary_of(canaries, name)) for name, address in addresses.items()}
    seen["wrong passwords"] = operator(given | wrong, "look")
    seen |= {name: log.read_text(errors="replace") for name, log in logs.items()}
    seen["alerts"] = "\n".join(receiver.texts)
    seen["tables"] = errors(engine)
    with redis.Redis.from_url(addresses["REDIS_URL"]) as client:
        stored = [client.get(key) for key in client.scan_iter("celery-task-meta-*")]
    seen["result backend"] = b"\n".join(each for each in stored if each and b'"SUCCESS"' not in each).decode()

    found = {(place, name) for place, shown in seen.items() for name, value in canaries.items() if value in shown}
    assert found == set(), [(place, line) for place, shown in seen.items() for line in shown.splitlines()
                            if any(value in line for value in canaries.values())][:20]  # fmt: skip
    # what was looked at is what was meant
    for place, words in {
        "worker": ("one_person", "is_born", "raised unexpected"), "commands": ("one_person", "idempotency_alert_webhook_url"),
        "tables": ("one_person", "is_born"), "result backend": ("one_person", "is_born"), "relay": ("event=alert",),
        f"/worker/{worker}": ("idempotency_redis_url",), "/api/tasks": ("one_person", "FAILURE"), "alerts": ("vault",),
        "/metrics of ours": ("idempotency_",), "wrong passwords": ("password",), "ps": ("tests.support.vault",),
        "beat": ("beat: Starting",),
    }.items():  # fmt: skip
        assert all(word in seen[place] for word in words), (place, seen[place][-3000:])


def canary_of(canaries: dict[str, str], name: str) -> str:
    """Another password than the right one, which must not be shown either."""
    return canaries.setdefault(f"wrong {name}", canary())


def answers(pages: httpx.Client, path: str) -> bool:
    with suppress(httpx.TransportError):
        answer = pages.get(path)
        return answer.status_code == httpx.codes.OK and bool(answer.json())
    return False


def ended(engine: Engine) -> int:
    with engine.connect() as connection:
        query = "SELECT count(*) FROM idempotency.records WHERE status IN ('completed', 'failed')"
        return int(connection.execute(text(query)).scalar_one())


def letters(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM idempotency.dead_letters")).scalar_one())


def errors(engine: Engine) -> str:
    """All that the tables hold beside arguments and results."""
    with engine.connect() as connection:
        rows = [
            *connection.execute(text("SELECT error, first_error, error_code FROM idempotency.records")),
            *connection.execute(text("SELECT first_error, last_error, reason FROM idempotency.dead_letters")),
            *connection.execute(text("SELECT last_error FROM idempotency.outbox")),
            *connection.execute(text("SELECT kind, name, host, queues FROM idempotency.processes")),
            *connection.execute(text("SELECT to_jsonb(a) FROM idempotency.audit a")),
        ]
    return json.dumps([list(row) for row in rows], default=str)
