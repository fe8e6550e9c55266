"""Spans of OpenTelemetry, where the application has set it up: which process has done what for an operation, and for how long.

Importing this module imports nothing of OpenTelemetry. The context travels as W3C `traceparent` and `tracestate` among a
message's headers, which no signature covers: one that is forged leads to a wrong parent or link, and decides nothing. No key,
argument, result or text of an error goes into a span. Baggage is not passed on: it may hold personal data, and messages are
stored. A tracer that raises loses spans, never work.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from billiard.exceptions import SoftTimeLimitExceeded

from ..errors import Again, Defer
from ..extras import extra, installed_version
from .logs import log

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext, Tracer

PARENT_HEADER = "traceparent"
STATE_HEADER = "tracestate"
# Characters. A `traceparent` has 55, later versions may have some more; a `tracestate` that is longer may be left out.
_LONGEST = {PARENT_HEADER: 128, STATE_HEADER: 512}
# What the names of our own attributes begin with.
OURS = "idempotency."
# Seconds for which a span waits for another thread that sets the tracer up.
PATIENCE = 5.0
# The release of OpenTelemetry's semantic conventions that names and attributes are of.
SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
# What an attempt is ended with that goes on later: no error.
_NO_ERRORS = (Again, Defer)

Kind = Literal["internal", "producer", "consumer", "client"]
Attributes = Mapping[str, str | int | bool]
SetUp = Callable[[], object]
T = TypeVar("T")


def trace_headers(headers: Mapping[str, Any]) -> dict[str, str]:
    """Of a message's headers, those with its trace; whatever else they may be, they are text of a limited length."""
    return {
        name: value
        for name, longest in _LONGEST.items()
        if isinstance(value := headers.get(name), str) and len(value) <= longest
    }


def begin(wanted: bool | SetUp | None) -> Traces | None:
    """What makes the spans of this process; None: there are none.

    `wanted`: as the setting `traces`. Raises `MissingExtra` if they are wanted and OpenTelemetry is not installed.
    """
    if wanted is False or (wanted is None and not _is_set_up()):
        return None
    with extra("otel"):
        return Traces(wanted if callable(wanted) else None)


def _is_set_up() -> bool:
    """Whether the application has set up a provider. Where it has not even imported OpenTelemetry, this does not either."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return False
    return not isinstance(api.get_tracer_provider(), (api.ProxyTracerProvider, api.NoOpTracerProvider))


class Traces:
    """Makes the spans of one process. `set_up`: called before the first one, so in a pool's child and not in its parent."""

    def __init__(self, set_up: SetUp | None = None) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._context, self._api = context, trace
        self._set_up, self._lock = set_up, threading.Lock()
        self._tracer: Tracer | None = None
        self._setting_up: int | None = None  # the thread that does
        # not the application's own propagators: what is stored today has to be read after they have changed
        self._w3c = TraceContextTextMapPropagator()
        self._kinds = {kind: trace.SpanKind[kind.upper()] for kind in get_args(Kind)}
        self._has_failed = False
        # whether records have no place for the span of an attempt
        self.is_without_links = False

    @contextmanager
    def span(
        self,
        name: str,
        kind: Kind = "internal",
        *,
        headers: Mapping[str, Any] | None = None,
        is_theirs: bool = False,
        attributes: Attributes | None = None,
    ) -> Iterator[Span]:
        """A span around a block, in the current trace; without one, in that of the `headers`, which it is linked to otherwise.

        `is_theirs`: the other way round, in the trace of the headers in any case, and linked to the current span.
        """
        span = self.open(name, kind, headers=headers, is_theirs=is_theirs, attributes=attributes)
        try:
            with span.entered():
                yield span
        except Exception as error:
            if not isinstance(error, _NO_ERRORS):
                span.fail(type(error).__name__)
            raise
        finally:
            span.end()

    def open(
        self,
        name: str,
        kind: Kind,
        *,
        headers: Mapping[str, Any] | None = None,
        is_theirs: bool = False,
        attributes: Attributes | None = None,
    ) -> Span:
        """The same span without a block: whoever opens it enters and ends it."""

        def start() -> Span:
            tracer = self._made()
            current = self._api.get_current_span()
            theirs = self._api.get_current_span(self._context_of(headers or {}))
            parent, other = (theirs, current) if is_theirs else (current, theirs)
            if not parent.get_span_context().is_valid:
                parent, other = other, parent
            linked = other.get_span_context()
            is_elsewhere = linked.is_valid and linked.trace_id != parent.get_span_context().trace_id
            made = tracer.start_span(
                name,
                self._api.set_span_in_context(parent),  # what else is in the current context stays there
                kind=self._kinds[kind],
                attributes=dict(attributes or {}),
                links=[self._api.Link(linked)] if is_elsewhere else [],
            )
            return Span(self, made)

        return self.safely(start, Span(self, self._api.INVALID_SPAN))

    def _made(self) -> Tracer:
        if self._tracer is not None:
            return self._tracer
        # what `set_up` itself sends or runs has no spans, nor has what waits for it too long: work goes on
        if self._setting_up == threading.get_ident() or not self._lock.acquire(timeout=PATIENCE):
            return self._api.NoOpTracer()
        try:
            if self._tracer is None:
                self._setting_up = threading.get_ident()
                set_up, self._set_up = self._set_up, None
                returned = None if set_up is None else self.safely(set_up, None)
                provider = (
                    returned if isinstance(returned, self._api.TracerProvider) else self._api.get_tracer_provider()
                )
                self._tracer = provider.get_tracer("idempotency", installed_version(), schema_url=SCHEMA)
            return self._tracer
        finally:
            self._setting_up = None
            self._lock.release()

    def entered(self, span: OtelSpan) -> Any:
        """Make a span the current one. Returns what `left` is given."""
        return self._context.attach(self._api.set_span_in_context(span))

    def left(self, token: Any) -> None:
        self._context.detach(token)

    def past(
        self,
        name: str,
        kind: Kind,
        headers: Mapping[str, Any],
        times: tuple[int, int],
        *,
        attributes: Attributes,
        failed: str | None = None,
    ) -> None:
        """A span of what has happened already, in the trace of these headers; none without one. `times`: ns since 1970."""

        def make() -> None:
            theirs = self._context_of(headers)
            if not self._api.get_current_span(theirs).get_span_context().is_valid:
                return
            made = self._made().start_span(
                name, theirs, kind=self._kinds[kind], attributes=dict(attributes), start_time=times[0]
            )
            if failed is not None:
                Span(self, made).fail(failed)
            made.end(times[1])

        self.safely(make, None)

    def current(self) -> Span:
        """The span that the code runs in."""
        return Span(self, self._api.get_current_span())

    @contextmanager
    def phase(self, name: str, timed: AbstractContextManager[object]) -> Iterator[None]:
        """A span around a phase that is timed, too."""
        with self.span(name), timed:
            yield

    def context_in(self, headers: Mapping[str, Any]) -> SpanContext | None:
        """The context that headers have; None: none, or none that can be read."""
        found = self._api.get_current_span(self._context_of(headers)).get_span_context()
        return found if found.is_valid else None

    def headers_of(self, span: OtelSpan) -> dict[str, str]:
        """A span's context as headers; none without a trace."""
        headers: dict[str, str] = {}
        self._w3c.inject(headers, self._api.set_span_in_context(span))
        return headers

    def mark_failed(self, span: OtelSpan, error: str) -> None:
        span.set_attribute("error.type", error)
        span.set_status(self._api.StatusCode.ERROR)

    def safely(self, part: Callable[[], T], otherwise: T) -> T:
        """Call a part of the tracer, which may be the application's own: what it raises is logged once, and costs a span."""
        try:
            return part()
        except SoftTimeLimitExceeded:  # the job's, raised once, wherever it is at the time
            raise
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning("traces_failed", error=type(error).__name__)
            return otherwise

    def _context_of(self, headers: Mapping[str, Any]) -> Context:
        return self._w3c.extract(trace_headers(headers), self._context.Context())


class Span:
    """A span that may not exist, and whose tracer may fail: nothing here raises."""

    def __init__(self, traces: Traces, span: OtelSpan) -> None:
        self._traces = traces
        self._span = span

    @property
    def is_recording(self) -> bool:
        """Whether anything that is said about it is kept: it was sampled, and has not ended."""
        return self._traces.safely(self._span.is_recording, False)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make it the current span of a block."""
        token = self._traces.safely(lambda: self._traces.entered(self._span), None)
        try:
            yield
        finally:
            if token is not None:
                self._traces.safely(lambda: self._traces.left(token), None)

    def headers(self) -> dict[str, str]:
        """The context as headers of a message that belongs to the span; none without a trace."""
        return self._traces.safely(lambda: self._traces.headers_of(self._span), {})

    def note(self, attributes: Attributes) -> None:
        """Set attributes."""
        self._traces.safely(lambda: self._span.set_attributes(dict(attributes)), None)

    def rename(self, name: str) -> None:
        """Give it the name that is known only now."""
        self._traces.safely(lambda: self._span.update_name(name), None)

    def link(self, headers: Mapping[str, Any], relation: str) -> None:
        """Link it to the span of these headers, unless that is this one."""

        def add() -> None:
            other = self._traces.context_in(headers)
            if other is not None and other.span_id != self._span.get_span_context().span_id:
                self._span.add_link(other, {"idempotency.relation": relation})

        self._traces.safely(add, None)

    def fail(self, error: str) -> None:
        """Mark it as failed. `error`: a type or a code, never an error's text, which may have a customer's data in it."""
        self._traces.safely(lambda: self._traces.mark_failed(self._span, error), None)

    def end(self) -> None:
        self._traces.safely(self._span.end, None)
