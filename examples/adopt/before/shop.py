"""A small shop: every order earns its customer points, and a large one a voucher."""

import os

from celery import Celery
from sqlalchemy import ForeignKey, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

app = Celery("shop", broker=os.environ["BROKER_URL"])
app.conf.update(
    task_default_queue="shop",
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


@app.task(acks_late=True, reject_on_worker_lost=True)
def award_points(order_id: str) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        customer = session.get_one(Customer, order.customer_id, with_for_update=True)
        customer.points += order.amount_cents // 100
    if order.amount_cents >= 10_000:
        issue_voucher.delay(order_id)


@app.task(acks_late=True, reject_on_worker_lost=True)
def issue_voucher(order_id: str) -> None:
    with Session.begin() as session:
        order = session.get_one(Order, order_id)
        session.add(Voucher(customer_id=order.customer_id))


def place_order(order_id: str, customer_id: str, amount_cents: int) -> None:
    with Session.begin() as session:
        session.add(Order(id=order_id, customer_id=customer_id, amount_cents=amount_cents))
    award_points.delay(order_id)
