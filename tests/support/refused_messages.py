"""Messages that no worker can run, each with the reason of the letter that it becomes."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from idempotency.wire.headers import KEY_HEADER
from tests.support import bank as b
from tests.support.dead_messages import DEPOSIT, headers

# Nothing of a body may be in a log.
SECRET = "4000-0000-0000-0002"
BODY = json.dumps([[], {"account": SECRET}, {}])
PAST = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
REFUSED: dict[str, tuple[str | bytes, dict[str, Any], str]] = {
    "no JSON": (f"{SECRET} {{", {}, "undecodable"),
    "no UTF-8": (SECRET.encode() + b"\xff\xfe", {}, "undecodable"),
    "broken compression": (BODY, {"headers": headers(compression="application/x-gzip")}, "undecodable"),
    "an object": (json.dumps({"secret": SECRET}), {}, "envelope"),
    "a number": ("5", {}, "envelope"),
    "an empty list": ("[]", {}, "envelope"),
    "two items": (json.dumps([[SECRET], {}]), {}, "envelope"),
    "four items": (json.dumps([[SECRET], {}, {}, {}]), {}, "envelope"),
    "other items": (json.dumps([SECRET, [], {}]), {}, "envelope"),
    "pickle": (SECRET.encode(), {"content_type": "application/x-python-serialize"}, "content_type"),
    "yaml": (f"!!python/object/apply:os.system ['{SECRET}']", {"content_type": "application/x-yaml"}, "content_type"),
    "no content type": (BODY, {"content_type": "", "content_encoding": ""}, "content_type"),
    "protocol 1": (json.dumps({"task": DEPOSIT, "id": "1", "args": [SECRET]}), {"headers": {}}, "protocol"),
    "no task": (BODY, {"headers": headers(task=None)}, "missing_task"),
    "a number as task": (BODY, {"headers": headers(task=5)}, "missing_task"),
    "no id": (BODY, {"headers": headers(id=None)}, "missing_id"),
    "unknown task": (BODY, {"headers": headers(task="bank.gone")}, "unknown_task"),
    "no key": (json.dumps([[SECRET], {}, {}]), {"headers": headers(task=b.returning.name)}, "missing_key"),
    "a bad key": (BODY, {"headers": headers(**{KEY_HEADER: "a\nb"})}, "invalid_key"),
    "other arguments": (json.dumps([[], {"amount": 1, "iban": SECRET}, {}]), {}, "invalid_arguments"),
    "expired": (BODY, {"headers": headers(expires=PAST)}, "expired"),
    "no time": (BODY, {"headers": headers(eta="soon")}, "invalid_header"),
    "no time limit": (BODY, {"headers": headers(timelimit=5)}, "invalid_header"),
    "odd stamps": (BODY, {"headers": headers(stamped_headers=[{"a": 1}])}, "invalid_header"),
    "no headers": (BODY, {"headers": headers(headers="none")}, "invalid_header"),
    "a NUL in a header": (BODY, {"headers": headers(task="bank.\0", id="\0")}, "unknown_task"),
}
