from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, text


def test_migrated_orders_whose_payment_has_failed_are_cancelled_for_their_payments_too(engine: Engine) -> None:
    import tasks.migrate as m

    config = Config()
    config.set_main_option("script_location", str(Path(m.__file__).parent / "migrations"))

    def upgrade(to: str) -> None:
        with engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, to)

    upgrade("0002")
    with engine.connect() as c:
        c.execute(
            text(
                "INSERT INTO orders (checkout_session_id, id, customer_id, amount, currency) VALUES ('cs', 'o1', 'c', 1000, 'EUR')"
            )
        )
        c.execute(
            text(
                "INSERT INTO payments (id, customer_id, amount, currency, status, refunded, failure) VALUES ('o1', 'c', 1000, 'EUR', 'failed', 0, 'card_declined')"
            )
        )
    upgrade("head")
    with engine.connect() as c:
        found = tuple(
            c.execute(
                text("SELECT o.status, p.status, p.order_status FROM orders o JOIN payments p ON p.order_id = o.id")
            ).one()
        )
    assert found == ("CANCELLED", "failed", "cancelled")
