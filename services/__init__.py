"""Postgres, Redis and RabbitMQ for development, the demo and the tests: real servers, without Docker or root.

    with services.running() as s:
        engine = create_engine(s.database_url)
        s.rabbitmq.kill()
        s.rabbitmq.start()

If DATABASE_URL, REDIS_URL or BROKER_URL is set, that server is used, and neither started nor stopped here.
"""

from services.local import NEEDS, Services, running
from services.postgres import Postgres
from services.rabbitmq import RabbitMQ
from services.redis import Redis
from services.server import Server, ServiceError

__all__ = ["NEEDS", "Postgres", "RabbitMQ", "Redis", "Server", "ServiceError", "Services", "running"]
