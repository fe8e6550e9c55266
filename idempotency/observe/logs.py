"""The library's log: key=value lines through the standard `logging`, as logger "idempotency".

Only state changes are logged, with task, key, fence and attempt where they apply; never arguments or results.
"""

from __future__ import annotations

import logging

import structlog

log: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    logging.getLogger("idempotency"),
    wrapper_class=structlog.stdlib.BoundLogger,
    processors=[
        structlog.stdlib.filter_by_level,
        structlog.processors.format_exc_info,
        structlog.processors.LogfmtRenderer(key_order=["event", "task", "key", "fence", "attempt"], drop_missing=True),
    ],
)
