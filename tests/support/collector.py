"""A receiver of OTLP over HTTP, as an OpenTelemetry Collector is one: what processes export is parsed and kept."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Exported:
    """A span as it was exported, and the process that it is of. Ids are hexadecimal; an empty `parent` is none."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    begun: int
    ended: int
    attributes: Mapping[str, Any]
    links: tuple[tuple[str, str, str], ...]  # trace, span, relation
    error: bool
    scope: str
    service: str

    @property
    def task(self) -> str:
        return str(self.attributes.get("idempotency.task", ""))


@dataclass
class Collector:
    """`status` and `delay` (seconds) say how exports are answered. `raw`: the bytes of all exports, decompressed."""

    url: str
    status: int = 200
    delay: float = 0.0
    raw: list[bytes] = field(default_factory=list)
    spans: list[Exported] = field(default_factory=list)

    def environment(self, service: str) -> dict[str, str]:
        """What a process exports here with, by OpenTelemetry's own variables."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_SERVICE_NAME": service,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def named(self, name: str) -> list[Exported]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of 127.0.0.1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    server.collector = collector  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        collector: Collector = self.server.collector  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        time.sleep(collector.delay)
        if collector.status == 200 and self.path == "/v1/traces":
            collector.raw.append(body)
            collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
        answer = ExportTraceServiceResponse().SerializeToString()
        try:
            self.send_response(collector.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
        except OSError:  # an exporter that has not waited
            self.close_connection = True

    def log_message(self, *args: Any) -> None: ...


def _spans(request: ExportTraceServiceRequest) -> Iterator[Exported]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Exported(
                    name=span.name,
                    kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    begun=span.start_time_unix_nano,
                    ended=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    links=tuple(
                        (
                            link.trace_id.hex(),
                            link.span_id.hex(),
                            str(_attributes(link.attributes).get("idempotency.relation", "")),
                        )
                        for link in span.links
                    ),
                    error=span.status.code == trace_pb2.Status.StatusCode.STATUS_CODE_ERROR,
                    scope=scope.scope.name,
                    service=str(service),
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}
