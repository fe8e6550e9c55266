"""Postgres, Redis and RabbitMQ for development, the demo and the tests: real servers, no Docker, no root needed.

    with services.running() as s:
        engine = create_engine(s.database_url)
        s.rabbitmq.kill()
        s.rabbitmq.start()

An address given in DATABASE_URL, REDIS_URL or BROKER_URL is used as it is; such a server is neither started nor
stopped.
"""

from services.local import NEEDS, Services, running
from services.postgres import Postgres
from services.rabbitmq import RabbitMQ
from services.redis import Redis
from services.server import Server, ServiceError

__all__ = ["NEEDS", "Postgres", "RabbitMQ", "Redis", "Server", "ServiceError", "Services", "running"]
