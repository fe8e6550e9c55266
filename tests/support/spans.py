"""The spans that this process makes, kept in memory: for tests that deliver messages themselves."""

from __future__ import annotations

import json
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Spans:
    """A provider that no other test sees, and what has ended of its spans, in order of their beginnings."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._kept = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.tracer = self.provider.get_tracer("tests")

    def set_up(self) -> TracerProvider:
        return self.provider

    def all(self) -> list[ReadableSpan]:
        return sorted(self._kept.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        found = self.named(name)
        assert len(found) == 1, [span.name for span in self.all()]
        return found[0]

    def text(self) -> str:
        """All that an exporter would be given."""
        return "\n".join(span.to_json() for span in self.all())

    def clear(self) -> None:
        self._kept.clear()


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.trace_id)


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def attribute(span: ReadableSpan, name: str) -> Any:
    return (span.attributes or {}).get(name)


def said(span: ReadableSpan, name: str) -> Any:
    """One of our attributes."""
    return attribute(span, f"idempotency.{name}")


def linked(span: ReadableSpan) -> list[tuple[int, str]]:
    """What a span is linked to: spans, and what they are to it."""
    return [(link.context.span_id, str((link.attributes or {}).get("idempotency.relation"))) for link in span.links]


def tree(spans: list[ReadableSpan]) -> str:
    """Names of spans by their parents, for messages of failed tests."""
    return json.dumps(
        [[span.name, hex(id_of(span)), span.parent and hex(span.parent.span_id)] for span in spans], indent=1
    )
