"""A small shop: every order earns its customer points, and a large one a voucher."""

import os

from celery import Celery
from sqlalchemy import ForeignKey, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from idempotency import IdempotentTask
from idempotency.queues import quorum_queue

app = Celery("shop", broker=os.environ["BROKER_URL"])
app.conf.update(
    task_default_queue="orders",
    task_queues=[quorum_queue("orders")],
    broker_transport_options={"confirm_publish": True},
    idempotency_database_url=os.environ["DATABASE_URL"],
)
engine = create_engine(os.environ["DATABASE_URL"])
Session = sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customers"
    id: Mapped[str] = mapped_column(primary_key=True)
    points: Mapped[int] = mapped_column(default=0)


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    customer_id: Mapped[str] = mapped_column(ForeignKey(Customer.id))
    amount_cents: Mapped[int]


class Voucher(Base):
    __tablename__ = "vouchers"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[str] = mapped_column(ForeignKey(Customer.id))


@app.task(base=IdempotentTask, bind=True, name="shop.award_points", key="{order_id}")
def award_points(self: IdempotentTask, order_id: str) -> None:
    order = self.session.get_one(Order, order_id)
    customer = self.session.get_one(Customer, order.customer_id, with_for_update=True)
    customer.points += order.amount_cents // 100
    if order.amount_cents >= 10_000:
        issue_voucher.enqueue(self.session, order_id)


@app.task(base=IdempotentTask, bind=True, name="shop.issue_voucher", key="{order_id}")
def issue_voucher(self: IdempotentTask, order_id: str) -> None:
    order = self.session.get_one(Order, order_id)
    self.session.add(Voucher(customer_id=order.customer_id))


def place_order(order_id: str, customer_id: str, amount_cents: int) -> None:
    with Session.begin() as session:
        session.add(Order(id=order_id, customer_id=customer_id, amount_cents=amount_cents))
        award_points.enqueue(session, order_id)
