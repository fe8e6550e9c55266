"""Streams whose position is part of the commit: `stream`, `kafka`, `rabbitmq_stream`."""

from .declaring import Stream, stream
from .handling import Handling
from .message import StreamMessage
from .sources import kafka, rabbitmq_stream

__all__ = ["Handling", "Stream", "StreamMessage", "kafka", "rabbitmq_stream", "stream"]
