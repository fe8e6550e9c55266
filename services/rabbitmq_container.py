"""RabbitMQ in a Docker container, for machines without the package and without root."""

from __future__ import annotations
import shutil, subprocess
from services.rabbitmq import RabbitMQ


class RabbitMQContainer(RabbitMQ):
    """TODO"""


def docker_answers() -> bool:
    return False
