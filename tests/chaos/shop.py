"""The worked application under chaos: orders by choreography and returns by saga, in a database of its own.

Its buyers, its carrier, its warehouse and its people are those of the demo, over the same bad connections as everything else,
and the demo's check says what must be there. Besides, people cancel sagas at any moment, tell them what the carrier and the
warehouse have said before these do, and let those go on that have stopped.
"""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from demo.faults import CARRIER_FAULTS, MAIL_FAULTS, PROVIDER_FAULTS, faults_option
from demo.input import Intake
from demo.order_books import SAGA, Told, check_orders, read_order_books
from demo.order_rules import Rules
from idempotency.application import close_runtime, runtime_of
from idempotency.operate.change import Change
from idempotency.operate.webhooks import add_endpoint, enable_endpoint
from idempotency.store import schema
from sandbox import ledger
from sandbox.process import Sandbox
from tests.chaos.customer import STRUCK as CUSTOMER_STRUCK
from tests.chaos.customer import Customer
from tests.chaos.evidence import Violation
from tests.chaos.fleet import reserved_port
from tests.chaos.saga_books import check_sagas, read_sagas
from tests.chaos.webhook_books import check_webhooks, read_webhooks

# Purchases per second, each some thirty operations with its return; and how many may be under way.
RATE, WINDOW, BATCH = 0.8, 12, 4
COPIES = 2
# More than in the demo: a short run has to see what can become of a return.
RETURNED = 2.0
PAUSE = 0.2
# How often, of these pauses, a person cancels whatever saga runs.
CANCELLED = 0.02
TIMES = {
    "IDEMPOTENCY_LEASE": "2.5",
    "IDEMPOTENCY_HEARTBEAT": "0.6",
    "IDEMPOTENCY_SWEEP": "1",
    "IDEMPOTENCY_RESEND_AFTER": "3",
    "IDEMPOTENCY_RETRY_BASE": "0.05",
    "IDEMPOTENCY_RETRY_CAP": "1",
    "IDEMPOTENCY_REDIS_PAUSE": "0.5",
    "IDEMPOTENCY_POOL_SIZE": "3",
    # more than a run has faults, as for the test application: their victims are not to blame
    "IDEMPOTENCY_MAX_ATTEMPTS": "100",
    "STRIPE_TIMEOUT": "2",
    "STRIPE_SEARCH_LAG": "0.2",
    "CARRIER_TIMEOUT": "2",
    "IDEMPOTENCY_WEBHOOK_TIMEOUT": "2",
    # of what is decided later only the provider's webhooks tell
    "STRIPE_FIRST_POLL": "3600",
}
# Of the charges, and after how many milliseconds.
UNDECIDED = {"undecided": 0.3, "decision_ms": 300.0}
COMMANDS = ("cancel", "signal")
_UNDER_WAY = text("""
SELECT count(*) FROM checkouts c
WHERE NOT EXISTS (SELECT FROM orders o WHERE o.id = c.order_id AND o.status IN ('PROCESSING', 'CANCELLED'))
""")
_OPEN = text("""
SELECT task || ' ' || key || ': ' || status FROM idempotency.records WHERE status IN ('started', 'released')
UNION ALL
SELECT 'outbox row ' || id || ' of ' || task || ' ' || key || ': ' || status FROM idempotency.outbox
WHERE settled_at IS NULL
""")
_ENDED = text("SELECT count(*) FROM idempotency.records WHERE status IN ('completed', 'failed')")
_STRUCK = text("""
SELECT (SELECT count(*) FROM idempotency.sagas WHERE status = 'FAILED') AS "sagas cancelled",
    (SELECT count(*) FROM idempotency.saga_steps WHERE (kind, state) = ('undo', 'done')) AS "steps of sagas undone",
    (SELECT count(*) FROM idempotency.saga_steps WHERE (kind, state) = ('wait', 'timed_out')) AS "waits timed out",
    (SELECT count(*) FROM idempotency.saga_steps WHERE (kind, state) = ('wait', 'done')) AS "waits ended by an event",
    (SELECT count(*) FROM orders WHERE status = 'PROCESSING') AS "orders processed",
    (SELECT count(*) FROM orders WHERE reason = 'on_request') AS "orders cancelled",
    (SELECT count(*) FROM returns WHERE status = 'REFUNDED') AS "returns refunded",
    (SELECT count(*) FROM payment_events WHERE is_applied) AS "reports of the provider applied",
    (SELECT count(*) FROM idempotency.webhook_deliveries WHERE status = 'delivered') AS "webhooks delivered",
    (SELECT count(*) FROM idempotency.webhook_deliveries WHERE status = 'given_up') AS "webhooks given up",
    (SELECT count(*) FROM idempotency.dead_letters WHERE reason IN ('unsigned', 'altered')) AS "forged messages to the shop refused"
""")


class Shop:
    """The second application. `environment`: of its processes. `engine` goes past the proxy, `addresses` do not."""

    def __init__(
        self,
        stack: ExitStack,
        directory: Path,
        engine: Engine,
        addresses: Mapping[str, str],
        *,
        seed: int,
        seconds: float,
    ) -> None:
        self.engine = engine
        held = reserved_port()
        stack.callback(held.close)
        self.port = held.getsockname()[1]
        secret = secrets.token_hex(16)
        reports = ["--webhook-url", self.webhooks_url, "--webhook-secret", secret]
        self.customer = Customer(directory / "customer")
        stack.callback(self.customer.close)
        faults = {"provider": PROVIDER_FAULTS | UNDECIDED, "mail": MAIL_FAULTS, "carrier": CARRIER_FAULTS}
        outside = {
            kind: Sandbox(
                kind,  # type: ignore[arg-type]
                directory / kind,
                "--seed",
                str(seed),
                "--faults",
                faults_option(rates),
                *(reports if kind == "provider" else ()),
            )
            for kind, rates in faults.items()
        }
        for each in outside.values():
            stack.callback(each.stop)
            each.start()
        self._outside = {kind: each.data for kind, each in outside.items()}
        self.crashes = directory / "shop-crash"
        counted = directory / "shop-metrics"
        self.crashes.mkdir()
        counted.mkdir()
        environment = {
            **addresses,
            **TIMES,
            "STRIPE_API_BASE": outside["provider"].url,
            "SMTP_URL": outside["mail"].url,
            "CARRIER_URL": outside["carrier"].url,
            "STRIPE_WEBHOOK_SECRETS": secret,
            "IDEMPOTENCY_WEBHOOK_ALLOWED_HOSTS": "127.0.0.1",
            "IDEMPOTENCY_WEBHOOK_CA_FILE": str(self.customer.ca_file),
        }
        # the application reads its addresses when it is imported
        with _environment(environment):
            from demo.orders import Buyers
            from tasks import app
            from tasks.migrate import migrate
            from tasks.tenants import DEFAULT
            from tests.chaos.shop_people import People
        stack.callback(close_runtime, app)
        # this process counts nothing, and does not die
        own = {"PROMETHEUS_MULTIPROC_DIR": str(counted), "CRASH_DIRECTORY": str(self.crashes)}
        self.environment = environment | own
        self.queues = list(app.amqp.queues.values())
        self._committing = engine.execution_options(isolation_level="READ COMMITTED")
        schema.migrate(self._committing)
        migrate(self._committing)
        runtime, change = runtime_of(app), Change("ann", "chaos")
        made = add_endpoint(runtime, change, DEFAULT, url=self.customer.url, events=["*"])
        self._endpoint, self.customer.secret = made.id, made.verifier
        enable_endpoint(runtime, change, made.id)
        self._rules = Rules(seed, returned=RETURNED)
        purchases = directory / "purchases.csv"
        _write_purchases(purchases, random.Random(f"purchases {seed}"), int(seconds * RATE) + BATCH)
        intake = Intake(purchases, None, seed=seed)
        self._lines = list(intake.accepted("purchase"))
        self._deliveries = self._rules.deliveries(self._lines)
        submitting = create_engine(addresses["DATABASE_URL"], connect_args={"connect_timeout": 5})
        stack.callback(submitting.dispose)
        self._buyers = Buyers(
            submitting,
            submitting,
            intake,
            copies=COPIES,
            rules=self._rules,
            deliveries=self._deliveries,
            carrier_url=outside["carrier"].url,
            returns=People,
        )
        stack.callback(self._buyers.close)
        assert isinstance(self._buyers.returns, People)
        self._people = self._buyers.returns
        self._to_come = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shop", daemon=True)

    @property
    def webhooks_url(self) -> str:
        """Where the provider posts its webhooks."""
        return f"http://127.0.0.1:{self.port}/webhooks/stripe"

    def start(self) -> None:
        """Let buyers come until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """No more buyers; what they have begun goes on with `open_work`."""
        self._stop.set()
        self._thread.join(90)

    def open_work(self) -> list[str]:
        """Do what buyers, carrier, warehouse and people have still to do; what has not come to its end."""
        self._look()
        with self.engine.connect() as connection:
            found = [f"shop: {each}" for each in connection.scalars(_OPEN)]
        if unsent := ledger.untold(self._outside["provider"]):
            found.append(f"shop: {unsent} webhooks that the provider has not sent")
        return [*found, *([f"shop: {self._to_come} things to do"] if self._to_come else [])]

    def ended(self) -> int:
        """How many operations have ended."""
        with self.engine.connect() as connection:
            return int(connection.execute(_ENDED).scalar_one())

    def status(self) -> str:
        """How far it has come."""
        did = ", ".join(f"{number} {what}" for what, number in self._people.done.items())
        return f"shop: {len(self._buyers.placed)} orders, {did or 'no return'}"

    def struck(self) -> dict[str, int]:
        """What has to happen in a run, each with how often it did."""
        with self.engine.connect() as connection:
            struck = dict(connection.execute(_STRUCK).one()._mapping)
        struck |= {name: self.customer.struck[name] for name in CUSTOMER_STRUCK}
        return struck | {f"commands to {name} a saga": self._people.given[name] for name in COMMANDS}

    def check(self) -> tuple[list[Violation], dict[str, int]]:
        """Whatever is wrong; and how often what has to happen did."""
        violations = [Violation("people", "a command", what) for what in self._people.surprises]
        violations += check_sagas(read_sagas(self.engine, SAGA))
        struck = self.struck()
        with self.engine.connect() as connection:
            is_open = list(connection.scalars(_OPEN))
        if is_open or self._to_come:
            # the books of what has not ended do not agree yet
            still = [*is_open, *[f"{self._to_come} things to do"] * bool(self._to_come)]
            return [*violations, *(Violation("I2", "shop", f"still open: {each}") for each in still)], struck
        webhooks = read_webhooks(self._committing, self._endpoint, self.customer.posted, self._outside["provider"])
        violations += check_webhooks(webhooks)
        placed = self._buyers.placed
        lines = [line for line in self._lines if line.id in placed]
        told = Told(lines, placed, self._deliveries, overruled=self._people.overruled)
        verdict = check_orders(read_order_books(self._committing, told, self._outside), self._rules)
        violations += [Violation("shop", found.id, f"{found.kind}: {found.what}") for found in verdict.discrepancies]
        return violations, struck

    # ------------------------------------------------------------ while things go wrong

    def _work(self) -> None:
        chance, began = random.Random("moments"), time.monotonic()
        come = 0
        while not self._stop.wait(PAUSE):
            try:
                due = (time.monotonic() - began) * RATE
                if come + BATCH <= min(due, len(self._lines)) and self._under_way() < WINDOW:
                    come += BATCH
                    self._buyers.submit(self._lines[come - BATCH : come])
                if chance.random() < CANCELLED:
                    self._people.cancel_any(chance)
            except (DBAPIError, PoolTimeout):
                pass  # the same again, in a moment
            except Exception as error:
                self._people.surprises.append(f"{type(error).__name__}: {error}")
            self._look()

    def _look(self) -> None:
        try:
            self._to_come = self._buyers.go_on()
            self._people.retry_stopped()
        except (DBAPIError, PoolTimeout):
            self._to_come = max(self._to_come, 1)
        except Exception as error:
            self._people.surprises.append(f"{type(error).__name__}: {error}")

    def _under_way(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(_UNDER_WAY).scalar_one())


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _write_purchases(path: Path, chance: random.Random, number: int) -> None:
    lines = ["purchase_id,customer_id,purchased_on,quantity,amount_cents,currency"]
    for each in range(number):
        quantity, price = chance.choice((1, 1, 2, 5)), chance.choice((0, 199, 1250, 99_900))
        lines.append(f"purchase-{each},buyer-{chance.randrange(20)},2026-03-02,{quantity},{quantity * price},EUR")
    path.write_text("\n".join(lines) + "\n")
