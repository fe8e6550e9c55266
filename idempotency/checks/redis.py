"""Checks of Redis: its version, role, eviction of hints, clock, and the Sentinels before it."""

from __future__ import annotations

import time
from typing import Any

from pydantic import SecretStr

from ..sentinel import Watch, client_of, is_sentinel, watch
from .clock import check_clock
from .findings import Finding, ok, warning
from .unreachable import TIMEOUT

# SET … KEEPTTL
OLDEST_REDIS = 6
# So that two can still agree when one is gone.
SENTINELS = 3


def check_redis(url: SecretStr) -> list[Finding]:
    address = url.get_secret_value()
    options: dict[str, Any] = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT, "decode_responses": True}
    with client_of(address, **options) as client:
        watched = watch(client) if is_sentinel(address) else None
        info = client.info()
        asked = time.time()
        seconds, microseconds = client.time()
        now = (asked + time.time()) / 2
    findings = []
    version, role, policy = info["redis_version"], info["role"], info.get("maxmemory_policy", "unknown")
    if int(version.partition(".")[0]) < OLDEST_REDIS:
        findings.append(
            warning("redis", f"version {version}, need at least {OLDEST_REDIS}", "hints need SET … KEEPTTL")
        )
    if role != "master":
        findings.append(warning("redis", f"role {role}, need master", "it refuses all hints; use the primary"))
    if policy != "noeviction":
        advice = "evicted hints mean more claims in Postgres"
        findings.append(warning("redis maxmemory-policy", f"{policy}, need noeviction", advice))
    findings = findings or [ok("redis", f"version {version}, {role}, {policy}")]
    if watched is not None:
        findings += _sentinels(watched)
    return [*findings, check_clock("redis clock", seconds + microseconds / 1e6 - now)]


def _sentinels(watched: Watch) -> list[Finding]:
    """Whether another Redis would take over. Without hints, every claim and duplicate goes to Postgres until one does."""
    subject = "redis sentinels"
    findings = []
    if watched.answer < watched.named:
        advice = "if those are away, nothing says which Redis is the primary, and hints stop; check the address"
        findings.append(warning(subject, f"{watched.answer} of {watched.named} answer", advice))
    if watched.up < SENTINELS:
        advice = "if one is away, no new primary is chosen, and hints stop"
        findings.append(warning(subject, f"{watched.up}, need at least {SENTINELS}", advice))
    elif watched.up <= watched.sentinels // 2:
        advice = "no majority chooses a new primary, and hints would stop"
        findings.append(warning(subject, f"{watched.up} of {watched.sentinels} are up", advice))
    if not watched.replicas:
        findings.append(warning(subject, "the primary has no replica", "nothing could take over, and hints would stop"))
    return findings or [ok(subject, f"{watched.up}, of which {watched.quorum} must agree; {watched.replicas} replicas")]
