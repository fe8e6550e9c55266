"""Three endpoints, each plain and behind the middleware: an order, and the least that an endpoint can write, in two ways.

The order reads its products, takes them from stock and writes itself with a row for each: what a shop does for a click.
`/jobs` writes one row and nothing else, so nothing dilutes what the middleware costs. `/async-jobs` does the same from an
asynchronous endpoint: plain with SQLAlchemy's asynchronous engine, keyed in the attempt's thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

from fastapi import Body, Depends, FastAPI
from pydantic import BaseModel, Field
from sqlalchemy import BigInteger, ForeignKey, MetaData, create_engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from idempotency.attempt.runtime import Runtime
from idempotency.http import IdempotencyMiddleware
from idempotency.http.fastapi import AttemptSession, CurrentAttempt
from idempotency.settings import Settings

PRODUCTS = 100
INSERT = text("INSERT INTO jobs (job, number) VALUES (:job, :number)")


class Base(DeclarativeBase):
    metadata = MetaData(schema="shop")


class Product(Base):
    __tablename__ = "products"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    cents: Mapped[int] = mapped_column(BigInteger)
    in_stock: Mapped[int] = mapped_column(BigInteger)


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    customer: Mapped[str]
    cents: Mapped[int] = mapped_column(BigInteger)
    lines: Mapped[list[Line]] = relationship()


class Line(Base):
    __tablename__ = "lines"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))
    product_id: Mapped[int] = mapped_column(ForeignKey(Product.id))
    quantity: Mapped[int] = mapped_column(BigInteger)
    cents: Mapped[int] = mapped_column(BigInteger)


class LineIn(BaseModel):
    product: int = Field(ge=1, le=PRODUCTS)
    quantity: int = Field(ge=1, le=100)


class OrderIn(BaseModel):
    customer: str = Field(min_length=1, max_length=100)
    lines: list[LineIn] = Field(min_length=1, max_length=20)


class OrderOut(BaseModel):
    id: int
    customer: str
    cents: int
    lines: list[LineIn]


settings = Settings.read({"database_url": os.environ["DATABASE_URL"]})
engine = create_engine(os.environ["DATABASE_URL"], pool_size=settings.pool_size, max_overflow=settings.pool_size)
asynchronous = create_async_engine(
    os.environ["DATABASE_URL"], pool_size=settings.pool_size, max_overflow=settings.pool_size
)

plain = FastAPI()
keyed = FastAPI()
keyed.add_middleware(IdempotencyMiddleware, runtime=Runtime(settings), required=True)


def prepare() -> None:
    """Create the tables, and fill the shelves."""
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA IF NOT EXISTS shop"))
        Base.metadata.create_all(connection)
    with Session(engine) as session, session.begin():
        session.add_all(Product(id=id, cents=100 * id, in_stock=10**12) for id in range(1, PRODUCTS + 1))


def transaction() -> Iterator[Session]:
    """The usual dependency: a session whose work is committed before the answer is sent."""
    with Session(engine) as session, session.begin():
        yield session


PlainSession = Annotated[Session, Depends(transaction, scope="function")]


@plain.post("/jobs", status_code=201)
def write(number: Annotated[int, Body(embed=True)]) -> dict[str, int]:
    with Session(engine) as session, session.begin():
        session.execute(INSERT, {"job": "plain", "number": number})
    return {"number": number}


@keyed.post("/jobs", status_code=201)
def write_once(number: Annotated[int, Body(embed=True)], session: AttemptSession) -> dict[str, int]:
    session.execute(INSERT, {"job": "http", "number": number})
    return {"number": number}


@plain.post("/async-jobs", status_code=201)
async def write_async(number: Annotated[int, Body(embed=True)]) -> dict[str, int]:
    async with AsyncSession(asynchronous) as session, session.begin():
        await session.execute(INSERT, {"job": "plain", "number": number})
    return {"number": number}


@keyed.post("/async-jobs", status_code=201)
async def write_async_once(number: Annotated[int, Body(embed=True)], attempt: CurrentAttempt) -> dict[str, int]:
    await attempt.run_sync(lambda session: session.execute(INSERT, {"job": "http", "number": number}))
    return {"number": number}


@plain.post("/orders", status_code=201)
def order(given: OrderIn, session: PlainSession) -> OrderOut:
    return place(session, given)


@keyed.post("/orders", status_code=201)
def order_once(given: OrderIn, session: AttemptSession) -> OrderOut:
    return place(session, given)


def place(session: Session, given: OrderIn) -> OrderOut:
    """Take the products from stock, in one order for all customers, and write the order."""
    wanted = {line.product: line.quantity for line in given.lines}
    products = session.scalars(select(Product).where(Product.id.in_(wanted)).order_by(Product.id).with_for_update())
    written = Order(customer=given.customer, cents=0)
    for product in products:
        quantity = wanted[product.id]
        product.in_stock -= quantity
        cents = quantity * product.cents
        written.cents += cents
        written.lines.append(Line(product_id=product.id, quantity=quantity, cents=cents))
    session.add(written)
    session.flush()
    return OrderOut(id=written.id, customer=written.customer, cents=written.cents, lines=given.lines)
