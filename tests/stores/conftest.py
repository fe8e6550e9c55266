"""Each store with a server of its own kind: Postgres and Redis are real, DynamoDB is `dynamodb_server`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import services
from idempotency.stores.dynamodb import DynamoDBStore
from idempotency.stores.redis import RedisStore
from tests.stores import dynamodb_server
from tests.stores.postgres import PostgresStore
from tests.stores.promises import STORES
from tests.stores.scene import AgeingDynamoDB, AgeingPostgres, AgeingRedis, Scene

# Seconds: a machine that runs several suites is no store that is away.
TIMEOUT = 30.0
REGION, TABLE = "eu-west-1", "operations"
SERVICE = "shop"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture(scope="session")
def dynamodb_endpoint() -> Iterator[str]:
    with dynamodb_server.running() as endpoint:
        before = dict(os.environ)
        os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL_DYNAMODB=endpoint)
        DynamoDBStore(REGION, TABLE, service=SERVICE, timeout=TIMEOUT).create_table()
        yield endpoint
        for name in (*CREDENTIALS, "AWS_ENDPOINT_URL_DYNAMODB"):
            os.environ.pop(name)
            if name in before:
                os.environ[name] = before[name]


@pytest.fixture(scope="session")
def dynamodb_store(dynamodb_endpoint: str) -> Iterator[DynamoDBStore]:
    """One for all tests: a client of boto3 takes longer to make than a test takes."""
    store = DynamoDBStore(REGION, TABLE, service=SERVICE, timeout=TIMEOUT)
    yield store
    store.close()


@pytest.fixture
def dynamodb_address(dynamodb_endpoint: str) -> str:
    return f"dynamodb://{REGION}/{TABLE}"


@pytest.fixture(scope="session")
def store_database(servers: services.Services, template: str) -> Iterator[str]:
    """One database for all tests of this folder that are about records alone: each has keys of its own."""
    from sqlalchemy import create_engine, text
    from sqlalchemy.engine import make_url

    name = f"stores_{os.getpid()}"
    admin = create_engine(servers.database_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY"))
    admin.dispose()
    yield make_url(servers.database_url).set(database=name).render_as_string(hide_password=False)
    servers.drop_database(name)


@pytest.fixture(params=STORES)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """Each store in turn."""
    yield from scene_of(request.param, request)


def scene_of(name: str, request: pytest.FixtureRequest) -> Iterator[Scene]:
    if name == "postgres":
        from sqlalchemy import create_engine

        engine = create_engine(request.getfixturevalue("store_database"), isolation_level="AUTOCOMMIT")
        postgres = PostgresStore(engine)
        yield Scene(postgres, AgeingPostgres(postgres))
        engine.dispose()
    elif name == "redis":
        redis = RedisStore(request.getfixturevalue("redis_url"), service=SERVICE, timeout=TIMEOUT)
        yield Scene(redis, AgeingRedis(redis))
        redis.close()
    else:
        dynamodb = request.getfixturevalue("dynamodb_store")
        yield Scene(dynamodb, AgeingDynamoDB(dynamodb))
