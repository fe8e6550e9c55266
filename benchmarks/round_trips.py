"""Round trips to Postgres, counted in libpq's trace."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from psycopg.pq import Trace
from sqlalchemy import Connection

Connect = Callable[[], AbstractContextManager[Connection]]


@contextlib.contextmanager
def counted(connects: Sequence[Connect]) -> Iterator[Counter[str]]:
    """Count round trips on the connections that these give in libpq's trace: each ends with ReadyForQuery."""
    trips: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        traces = []
        for connect in connects:
            with connect() as connection:  # opened by the warm-up, and given again to the next that asks
                wire = connection.connection.driver_connection.pgconn  # type: ignore[union-attr]
            trace = stack.enter_context(tempfile.TemporaryFile())
            wire.trace(trace.fileno())
            wire.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
            stack.callback(wire.untrace)
            traces.append((wire, trace))
        yield trips
        for wire, trace in traces:
            wire.untrace()  # writes what libpq still holds back
            trace.seek(0)
            sent = "statement"
            for line in trace:
                if line.startswith(b"F") and b"Query" in line:
                    sent = next((name for name in ("BEGIN", "COMMIT") if name.encode() in line), "statement")
                elif line.startswith(b"B") and b"ReadyForQuery" in line:
                    trips[sent] += 1
                    sent = "statement"
