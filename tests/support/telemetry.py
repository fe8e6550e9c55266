"""OpenTelemetry as docs/traces.md sets it up, for processes of tests: `TRACES=tests.support.telemetry:set_up`.

Where spans go, and as what service, is said by OpenTelemetry's own environment variables.
"""

from __future__ import annotations

from typing import Any


def set_up() -> None:
    """Export this process's spans over OTLP, and what is left when it ends."""
    from celery.signals import worker_process_shutdown
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)

    def flush(**_: Any) -> None:
        provider.shutdown()

    worker_process_shutdown.connect(flush, weak=False)
