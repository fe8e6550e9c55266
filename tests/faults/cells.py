"""The fault matrix as data: what may go wrong (F1–F23), in which phase of an operation (P0–P10) or of a saga (S0–S3), and
what must come out.

A cell holds the matrix' own words. `outcomes` are the letters that a test of the cell may have seen; whatever else a
test sees fails it. Cells that say "–" need no test: the fault has no effect there.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_EFFECT = "–"

PHASES = {
    "P0": "delivered, before the claim",
    "P1": "claimed",
    "P2": "in the body",
    "P3": "gateway called, reply not recorded",
    "P4": "finish UPDATE done, COMMIT not sent",
    "P5": "COMMIT sent, reply not received",
    "P6": "committed, before the ack",
    "P7": "relay selected a row, before publish",
    "P8": "published, no confirm yet",
    "P9": "confirmed, not yet marked",
    "P10": "webhook posted to a customer, answer not recorded",
}

SAGA_PHASES = {
    "S0": "a step written, COMMIT not sent",
    "S1": "a call sent, and let go to wait for it: committed, before the ack",
    "S2": "a wait decided, COMMIT not sent",
    "S3": "said that it is undone, COMMIT not sent",
}

BATCH_PHASES = {
    "B0": "a batch that commits each: the first in its body, the others claimed",
    "B1": "the first committed, before its ack, the others claimed",
    "B2": "a batch that commits together: all written, COMMIT not sent",
    "B3": "COMMIT sent, reply not received",
    "B4": "committed, before the acks",
}

LEGEND = {
    "R": "redelivered, claimed again with another fence, runs, one commit",
    "R+": "the same while the stale attempt still exists; what it writes matches no row",
    "G": "R, and the gateway is called again under the same key: one charge",
    "U": "outcome unknown to its own process: the record is read again on a new connection; completed → ack, else R",
    "D": "the duplicate finds the stored result and is acknowledged",
    "K": "published again; the consumer drops it",
    "W": "waits or fails closed, and resumes",
    "Q": "a dead letter after N attempts",
    "S": "needed the sweeper: sent again by recover or resend",
    "re-POST": "posted again, under the same id and with the same body; delivered",
    "refused": "the receiver refuses a time that is not now, each attempt is in sight, and it is delivered once the clock is right",
    "finish": "the interrupted process ends what it has begun",
    "retry": "released, and another attempt with back-off",
    "failed": "failed at once, with a dead letter",
    "unknown": "failed at once as effect_unknown, with a dead letter: a call had been begun",
    "1 runs": "of all copies one runs; the others wait, or find the stored result",
    "1 wins": "of all copies one commits",
    "1 relay": "of all relays one publishes the row",
    "put back": "no worker that knows the task: sent again, later each time; a dead letter once the grace is over",
    NO_EFFECT: "no effect",
}


@dataclass(frozen=True)
class Cell:
    """What the matrix says of one fault in one phase; of two faults together `phase` is empty."""

    fault: str
    phase: str
    expected: str
    outcomes: frozenset[str]

    @property
    def is_live(self) -> bool:
        """Whether a test has to show it."""
        return self.expected != NO_EFFECT

    @property
    def name(self) -> str:
        return f"{self.fault}/{self.phase}" if self.phase else self.fault


TITLES = {
    "F1": "SIGKILL of the pool child",
    "F2": "SIGKILL of the whole worker / relay",
    "F3": "SIGSTOP past the lease, later SIGCONT",
    "F4": "SIGTERM, then SIGQUIT",
    "F5": "broker connection reset",
    "F6": "broker SIGKILL and restart",
    "F7": "broker SIGSTOP",
    "F8": "broker wiped: all queues and messages gone",
    "F9": "Redis SIGKILL, restarts empty (or FLUSHALL)",
    "F10": "Redis unreachable throughout",
    "F11": "Redis clock +60 s / -1 h",
    "F12": "Postgres SIGKILL and recovery",
    "F13": "Postgres connection cut on a reply",
    "F14": "Postgres disk full or read-only",
    "F15": "worker clock ±1 day",
    "F16": "the same message at 8 workers at once",
    "F17": "poison: the process is killed every time",
    "F18": "the body raises: retryable / permanent",
    "F19": "beat doubled; down an hour; old schedule file",
    "F20": "gateway: timeout, 500 after success, 429, slow drip",
    "F21": "old and new code share the queues",
    "F22": "SIGKILL of the web server, and its client asks another one",
    "F23": "SIGSTOP of the web server past the lease, later SIGCONT",
}

# The columns are P0–P9; P10 is below. Words that are no letters are translated by _WORDS below.
_ROWS = {
    "F1": ("R", "R,S", "R,S", "G,S", "R", "U", "D", "–", "–", "–"),
    "F2": ("R", "R,S", "R,S", "G,S", "R", "U", "D", "W", "K", "K"),
    "F3": ("R+", "R+", "R+", "G", "R", "U", "D", "W, then K", "K", "K"),
    "F4": (
        "–",
        "finish or R",
        "finish or R",
        "finish or G",
        "finish or R",
        "U",
        "D",
        "finish",
        "finish or K",
        "finish or K",
    ),
    "F5": ("R", "R+", "R+", "G", "first commit wins", "D", "D", "W", "K, new channel", "K or –"),
    "F6": ("R", "R+", "R+", "G", "first commit wins", "D", "D", "W", "K", "–"),
    "F7": ("W", "– or R+", "– or R+", "– or G", "–", "–", "D or –", "W", "timeout, close channel, K", "–"),
    "F8": ("S", "S", "S", "G,S", "S", "U,S", "–", "W", "S", "S"),
    "F9": ("–", "R+ possible", "R+", "G", "–", "–", "–", "–", "–", "–"),
    "F10": (
        "claim by Postgres alone, slower",
        "heartbeat carries on in Postgres",
        "finishes, the fence decides",
        "G",
        *("–",) * 6,
    ),
    "F11": ("– / S", "R+ / –", "R+ / –", "G / –", *("–",) * 6),
    "F12": ("W", "R", "R", "G", "R", "U", "D", "W", "K", "K"),
    "F13": ("W", "U on the claim", "–", "–", "R", "U", "D", "W", "–", "K"),
    "F14": ("W", "W", "W", "G", "R", "R", "D", "W", "–", "K"),
    "F15": ("–",) * 10,
    "F16": ("1 runs, 7 W or D", "–", "–", "G", "1 wins", "–", "D", "1 relay", "–", "K"),
    "F17": ("Q", "Q", "Q", "Q", *("–",) * 6),
    "F18": ("–", "–", "retry with backoff / failed + dead letter", "G / unknown", *("–",) * 6),
    "F19": ("no double commit, no storm", "S", "S", "S", *("–",) * 6),
    "F20": ("–", "–", "–", "G", *("–",) * 6),
    "F21": (
        "unknown task → put back until a worker knows it",
        "both honour the fence",
        "both honour the fence",
        "both honour the fence",
        "both honour the fence",
        "both honour the fence",
        "D",
        "K",
        "K",
        "K",
    ),
    "F22": ("R", "R", "R", "G", "R", "U", "D", "–", "–", "–"),
    "F23": ("R", "R+", "R+", "G", "R+", "–", "D", "–", "–", "–"),
}

# The column P10; of every other fault the phases before show what it does to a delivery.
_P10 = {
    "F1": "re-POST,S",
    "F2": "re-POST,S",
    "F3": "re-POST",
    "F4": "finish or re-POST",
    "F12": "re-POST",
    "F13": "re-POST",
    "F14": "re-POST",
    "F15": "refused",
    "F20": "re-POST",
}

# The columns are S0–S3; what a fault without a row here does to a saga is shown by P0–P9.
_SAGA_ROWS = {
    "F1": ("R,S", "D", "R,S", "R,S"),
    "F2": ("R,S", "D or D,S", "R,S", "R,S"),
    "F3": ("R+", "D or D,S", "R+", "R+"),
    "F4": ("R", "D", "R", "R,S"),
    "F5": ("R", "D", "R", "R,S"),
    "F6": ("R", "D", "R", "R,S"),
    "F8": ("R or R,S", "S or D,S", "R or R,S", "R,S"),
    "F9": ("–",) * 4,
    # of S1: whether the redelivery comes before Postgres is back
    "F12": ("R", "W or D", "R", "R or W"),
    "F13": ("U", "–", "U", "U"),
    "F14": ("W or R", "–", "W or R", "–"),
    "F15": ("–",) * 4,
    "F16": ("–", "D", "–", "–"),
    "F17": ("Q", "–", "Q", "Q"),
    "F18": ("retry / failed", "–", "retry / failed", "–"),
}

# The columns are B0–B4, the letters those of all three operations.
_BATCH_ROWS = {
    "F1": ("R,S", "D or R,S", "R,S", "D", "D"),
    "F2": ("R,S", "D or R,S", "R,S", "D", "D"),
    "F3": ("R+", "D or R+", "R+", "–", "D"),
    "F4": ("R", "D or R", "R", "U or D", "D"),
    "F5": ("R", "D or R", "R", "U or D", "D"),
    # of B0 and B1: whether Postgres is back when the next one writes
    "F12": ("R or D", "R or D", "R", "U", "D"),
    "F13": ("–", "–", "–", "U", "–"),
}

_PAIRS = {
    "F3@P2+F9": ("a worker frozen in the body, and Redis empty", "R+"),
    "F3@P4+F12": ("a worker frozen before COMMIT, and Postgres killed", "R"),
    "F5@P5+F13": ("the broker's connection reset while COMMIT's reply is lost", "U or D"),
    "F6@P8+F2": ("the broker killed before its confirm, and the relay too", "K"),
    "F8+F9": ("broker and Redis both wiped", "S or R,S"),
    "replay+F2": ("a dead letter replayed, and the worker killed", "R or R,S"),
}

_WORDS = {
    "first commit wins": ("R", "R+", "D"),
    "K, new channel": ("K",),
    "timeout, close channel, K": ("K",),
    "W, then K": ("K",),
    "R+ possible": ("R+", "–"),
    "claim by Postgres alone, slower": ("–",),
    "heartbeat carries on in Postgres": ("–",),
    "finishes, the fence decides": ("–", "R+"),
    "U on the claim": ("U",),
    "1 runs, 7 W or D": ("1 runs",),
    "retry with backoff / failed + dead letter": ("retry", "failed"),
    "no double commit, no storm": ("–", "D"),
    "unknown task → put back until a worker knows it": ("put back",),
    "both honour the fence": ("R+", "R", "G", "U", "D"),
}

# Outcomes beyond the matrix' words that are as good or better, each with the reason.
ALSO = {
    ("F1", "P4"): ("R,S", "the dead holder's lease still runs, as in P1–P3"),
    ("F2", "P4"): ("R,S", "the dead holder's lease still runs, as in P1–P3"),
    ("F13", "P9"): ("–", "a mark whose reply is lost has been made: nothing is sent again"),
    ("F8", "P0"): (
        "R,S",
        "its process ended with the broker's connection; the delivery that the sweeper sent is the first claim",
    ),
    **{
        ("F8", phase): (
            letter,
            "a worker without its broker ends its attempts: they go back to the outbox by themselves",
        )
        for phase, letter in (("P1", "R"), ("P2", "R"), ("P3", "G"), ("P4", "R"))
    },
    ("F8", "S1"): ("–", "what was published after the wipe came back as unroutable, so the relay published it again"),
    **dict.fromkeys(
        (("F12", "P7"), ("F14", "P7")), ("K", "the relay has its rows and publishes them; what waits is its mark")
    ),
    **dict.fromkeys(
        (("F14", "P1"), ("F14", "P2")), ("R", "it waits until it may write, and goes on as another attempt")
    ),
    **dict.fromkeys(
        (("F9", "P2"), ("F9", "P3"), ("F10", "P3")),
        ("–", "the lease in Postgres keeps a duplicate away, whatever Redis has lost"),
    ),
    **dict.fromkeys((("F19", "P1"), ("F19", "P2")), ("R,S", "its holder was dead: it is another attempt")),
    ("F19", "P0"): ("R,S", "where no worker may be asked what it holds, that is sent once more, and runs first"),
    ("F19", "P3"): ("G,S", "its holder was dead, and the gateway had been called"),
    **dict.fromkeys(
        (("F12", "B0"), ("F12", "B1"), ("F12", "B2")),
        ("R+", "where Postgres takes longer than a lease to come back, its attempt finds that out when it goes on"),
    ),
    ("F8+F9", ""): ("R", "a worker without its broker ends its attempts: they go back to the outbox by themselves"),
    ("F3@P4+F12", ""): ("R+", "the frozen attempt still exists, and finds out when it goes on"),
}


def _outcomes(fault: str, phase: str, expected: str) -> frozenset[str]:
    letters: set[str] = set()
    for part in [expected] if expected in _WORDS else expected.replace(" / ", " or ").split(" or "):
        letters.update(_WORDS.get(part, (part,)))
    if "R+" in letters:
        # the stale attempt may run beside it; where it is ended at once, it does not
        letters.add("R")
    if (fault, phase) in ALSO:
        letters.add(ALSO[fault, phase][0])
    return frozenset(letters)


def _cell(fault: str, phase: str, expected: str) -> Cell:
    return Cell(fault, phase, expected, _outcomes(fault, phase, expected))


CELLS = (
    {
        (fault, phase): _cell(fault, phase, expected)
        for fault, row in _ROWS.items()
        for phase, expected in zip(PHASES, (*row, _P10.get(fault, NO_EFFECT)), strict=True)
    }
    | {
        (fault, phase): _cell(fault, phase, expected)
        for fault, row in _SAGA_ROWS.items()
        for phase, expected in zip(SAGA_PHASES, row, strict=True)
    }
    | {
        (fault, phase): _cell(fault, phase, expected)
        for fault, row in _BATCH_ROWS.items()
        for phase, expected in zip(BATCH_PHASES, row, strict=True)
    }
    | {(pair, ""): _cell(pair, "", expected) for pair, (_, expected) in _PAIRS.items()}
)

# The faults of the second table.
OF_SAGAS = tuple(_SAGA_ROWS)
# And of the third.
OF_BATCHES = tuple(_BATCH_ROWS)
PAIRS = {pair: title for pair, (title, _) in _PAIRS.items()}


def find(fault: str, phase: str = "") -> Cell:
    """The cell that a test names. ValueError when the matrix has none."""
    try:
        return CELLS[fault, phase]
    except KeyError:
        raise ValueError(f"no cell {fault}/{phase} in the matrix") from None
