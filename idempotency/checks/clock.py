"""Whether a server's clock agrees with this host's."""

from __future__ import annotations

from .findings import Finding, ok, warning

# Seconds. All comparisons use the database's clock, so a difference only costs latency and confuses logs.
CLOCK_TOLERANCE = 1.0


def check_clock(subject: str, ahead: float) -> Finding:
    found = f"{abs(ahead):.3f} s {'ahead of' if ahead >= 0 else 'behind'} this host"
    if abs(ahead) > CLOCK_TOLERANCE:
        return warning(
            subject, f"{found}, at most {CLOCK_TOLERANCE:g} s", "costs latency and confuses logs; loses nothing"
        )
    return ok(subject, found)
