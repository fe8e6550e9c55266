"""The application of a program: a saga that carries out a program's nodes, and the tasks and the provider that it uses.

Nothing here is unique and nothing is checked by the database, so that what goes wrong is there to be seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from celery import Celery
from sqlalchemy import text

from idempotency import Defer, IdempotentTask, PermanentError
from idempotency.attempt.effects import DidNotHappen, EffectInDoubt, Happened
from idempotency.queues import quorum_queue
from idempotency.sagas import Call as SagaCall
from idempotency.sagas import call, saga
from tests.sagas.programs.program import (
    TASKS,
    Call,
    Caught,
    Effect,
    Gather,
    Nested,
    Node,
    Raise,
    Sleep,
    Step,
    Undo,
    Value,
    Wait,
    nodes_of,
    sagas_of,
)

QUEUE = "programs"
LEASE = 900.0
# More than the faults of a program and its failures for a while use.
MAX_ATTEMPTS = 12
EVENT = "programs.event"
SAGA = "programs.saga"
UNDO = "programs.undo"

TABLES = "CREATE TABLE entries (id bigserial PRIMARY KEY, account text)"
_INSERT = text("INSERT INTO entries (account) VALUES (:account)")

app = Celery("programs", set_as_current=False)


def configure(database_url: str) -> None:
    """Point the application at a database. There is no broker, and no Redis."""
    app.conf.update(
        broker_url="memory://",
        task_queues=[quorum_queue(QUEUE, exchange=QUEUE, dead_letter_queue=f"{QUEUE}-dead")],
        task_default_queue=QUEUE,
        task_default_exchange=QUEUE,
        task_default_exchange_type="topic",
        task_default_routing_key=QUEUE,
        task_create_missing_queues=False,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        timezone="UTC",
        idempotency_database_url=database_url,
        idempotency_lease=LEASE,
        idempotency_heartbeat=LEASE / 4,
        idempotency_max_attempts=MAX_ATTEMPTS,
        # due at once: time passes when the runner says so
        idempotency_retry_base=0.0,
    )


class Provider:
    """Acts once per key, and can be asked about a key; whoever asks closes it."""

    def __init__(self) -> None:
        self.acts: list[tuple[str, str]] = []  # thing and key
        self.refused: set[str] = set()  # calls under a closed key
        self._closed: set[str] = set()

    def act(self, thing: str, key: str) -> None:
        if (thing, key) in self.acts:
            return
        if key in self._closed:
            self.refused.add(key)
            raise PermanentError(f"{thing}: the key is closed", "closed_key")
        self.acts.append((thing, key))

    def ask(self, thing: str, key: str) -> bool:
        self._closed.add(key)
        return (thing, key) in self.acts


class Script:
    """What the application is told about one program, and what it has seen of it."""

    def __init__(self, root: Nested) -> None:
        self.sagas = {each.thing: each for each in sagas_of(root)}
        inside = [node for each in self.sagas.values() for node in nodes_of(each.body)]
        self.things: dict[str, Node] = {node.thing: node for node in inside if not isinstance(node, Gather | Caught)}
        self.provider = Provider()
        self.failed: Counter[str] = Counter()  # failures for a while, by thing
        self.mended: set[str] = set()  # undos that a person has seen to
        self.waits: dict[tuple[str, str], Wait] = {}  # by saga and row

    def undo_of(self, thing: str) -> Undo | None:
        node = self.things[thing]
        assert isinstance(node, Step | Effect | Call | Nested)
        return node.undo

    def fail_for_a_while(self, what: str, tries: int) -> None:
        if self.failed[what] < tries:
            self.failed[what] += 1
            if self.failed[what] % 2:
                raise ConnectionError(f"{what}: for a while")
            raise Defer(5.0, f"{what}: later")


# The program that runs in this process.
script: Script


def begin(root: Nested) -> Script:
    """Let the application carry out this program."""
    global script
    script = Script(root)
    return script


# ---------------------------------------------------------------- what a saga uses


def do_step(session: Any, thing: str) -> str:
    node = script.things[thing]
    assert isinstance(node, Step)
    session.execute(_INSERT, {"account": f"step:{thing}"})
    script.fail_for_a_while(thing, node.tries)
    if node.refused:
        raise PermanentError(f"{thing} is refused", "step_refused")
    return f"did {thing}"


def do_effect(thing: str, *, idempotency_key: str) -> str:
    node = script.things[thing]
    assert isinstance(node, Effect)
    if node.how == "refused":
        raise PermanentError(f"{thing} is refused", "effect_refused")
    if node.how in ("down", "dead"):
        _stumble(node)
    script.provider.act(thing, idempotency_key)
    if node.how in ("lost", "mute"):
        _stumble(node)
    return f"charged {thing}"


def _stumble(node: Effect) -> None:
    if node.how in ("dead", "mute") or script.failed[node.thing] < node.tries:
        script.failed[node.thing] += 1
        raise ConnectionError(f"{node.thing}: no answer")


def ask(thing: str, *, doubt: EffectInDoubt) -> Happened | DidNotHappen:
    return Happened(f"charged {thing}") if script.provider.ask(thing, doubt.idempotency_key) else DidNotHappen()


def _calling(number: int) -> Any:
    @app.task(base=IdempotentTask, bind=True, name=f"programs.call{number}", shared=False)
    def called(self: IdempotentTask, thing: str) -> str:
        node = script.things[thing]
        assert isinstance(node, Call)
        self.session.execute(_INSERT, {"account": f"call:{thing}"})
        script.fail_for_a_while(thing, node.tries)
        if node.refused:
            raise PermanentError(f"{thing} is refused", "call_refused")
        return f"called {thing}"

    return called


calls = [_calling(number) for number in range(TASKS)]


@app.task(base=IdempotentTask, bind=True, name=UNDO, shared=False)
def undo(self: IdempotentTask, thing: str, result: Any) -> str:
    """Undoes a thing; it writes what it was told to undo."""
    how = script.undo_of(thing)
    assert how is not None
    told = result if isinstance(result, str) else "a saga"
    self.session.execute(_INSERT, {"account": f"undo:{thing} {told}"})
    script.fail_for_a_while(f"undo {thing}", how.tries)
    if how.broken and thing not in script.mended:
        raise PermanentError(f"the undo of {thing} is broken", "undo_broken")
    return f"undid {thing}"


# ---------------------------------------------------------------- the saga


def channel_of(saga_thing: str, channel: int) -> str:
    return f"{saga_thing}/{channel}"


@saga(SAGA, key="{thing}", entity="thing", events={EVENT: "{channel}"}, app=app, shared=False)
def conduct(saga: Any, thing: str) -> Any:
    """Carry out the program of a saga."""
    return perform(saga, thing, script.sagas[thing].body, count(1))


def perform(saga: Any, of: str, body: Sequence[Node], waits: Iterator[int]) -> list[Any]:
    results: list[Any] = []
    for node in body:
        match node:
            case Caught():
                try:
                    results.append(perform(saga, of, node.body, waits))
                except PermanentError as failure:
                    results.append(f"caught {failure.code}")
            case Gather():
                results.append(saga.gather(*(_call(each) for each in node.calls)))
            case Wait():
                match, number = channel_of(of, node.channel), next(waits)
                script.waits[of, EVENT if number == 1 else f"{EVENT}#{number}"] = node
                event = saga.wait_for(EVENT, match=match, timeout=node.seconds)
                results.append(perform(saga, of, node.otherwise, waits) if event is None else event["data"]["number"])
            case _:
                results.append(_perform_one(saga, node))
    return results


def _perform_one(saga: Any, node: Node) -> Any:
    match node:
        case Step():
            return saga.step(node.name, do_step, node.thing, undo=_undo(node.undo))
        case Effect():
            reconcile = ask if node.asks else None
            return saga.effect(node.name, do_effect, node.thing, undo=_undo(node.undo), reconcile=reconcile)
        case Call():
            return saga.call(calls[node.task], node.thing, undo=_undo(node.undo))
        case Nested():
            return saga.call(conduct, node.thing, undo=_undo(node.undo))
        case Sleep():
            return saga.sleep(node.seconds)
        case Value(kind="now"):
            return saga.now().timestamp()
        case Value(kind="uuid"):
            return str(saga.uuid())
        case Value():
            return saga.version(node.thing)
        case Raise(how="for good"):
            raise PermanentError(f"{node.thing} gives up", "gives_up")
        case Raise(how="always"):
            raise ValueError(f"{node.thing} fails")
        case Raise():
            script.fail_for_a_while(node.thing, node.tries)
    return None


def _call(node: Call | Nested) -> SagaCall:
    return call(conduct if isinstance(node, Nested) else calls[node.task], node.thing, undo=_undo(node.undo))


def _undo(drawn: Undo | None) -> Any:
    return None if drawn is None else undo
