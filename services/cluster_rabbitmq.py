"""Three RabbitMQ nodes that form one cluster, as processes on one machine."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from services.rabbitmq import USER, RabbitMQ, epmd_command
from services.server import READY_SECONDS, Server, ServiceError

NAMES = ("rabbitmq-a", "rabbitmq-b", "rabbitmq-c")
CLUSTER = "services"
# Seconds without a sign of another node after which it counts as gone; RabbitMQ's default is 60.
NET_TICK = 8
# So long a node may see fewer than all before it is started anew, lack members of queues, and answer nothing: a busy machine
# needs a minute to start one.
ALONE, MEMBERLESS, SILENT = 6.0, 20.0, 90.0
# Seconds in which the leader of a queue carries out a command that changes nothing.
ANSWERS_WITHIN = 20
# The nodes whose leaders of quorum queues do not: each is asked to collect its garbage, all at once, as one command asks each.
_UNANSWERED = """\
Ask = self(),
Asked = [begin
    {{_, Node}} = Leader = amqqueue:get_pid(Queue), Tag = make_ref(),
    spawn(fun() ->
        Ask ! {{Tag, catch ra:process_command(Leader, rabbit_fifo:make_garbage_collection(), {milliseconds})}}
    end),
    {{Node, Tag}}
end || Queue <- rabbit_amqqueue:list(), amqqueue:get_type(Queue) =:= rabbit_quorum_queue],
lists:usort([Node || {{Node, Tag}} <- Asked, receive {{Tag, {{ok, _, _}}}} -> false; {{Tag, _}} -> true end]).
"""


class PortMapper(Server):
    """Erlang's epmd, which all three nodes use."""

    name = "epmd"
    port_names: ClassVar[Sequence[str]] = ("epmd",)

    @property
    def url(self) -> str:
        return f"epmd://127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str | Path]:
        return epmd_command(self.port)

    def _check(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=2):
            pass


class RabbitMQNode(RabbitMQ):
    """One of the three. Where there is no majority of them, it stops serving."""

    port_names: ClassVar[Sequence[str]] = ("amqp", "management", "distribution")

    def __init__(self, directory: Path, mapper: PortMapper) -> None:
        super().__init__(directory)
        # used by what this class inherits
        self.ports = {**self.ports, "epmd": mapper.port}

    @property
    def node_name(self) -> str:
        return _node_name(self.directory.name)

    @property
    def _cookie(self) -> str:
        return hashlib.sha256(self.password.encode()).hexdigest()

    @property
    def _more_configuration(self) -> str:
        nodes = "".join(
            f"cluster_formation.classic_config.nodes.{number} = {_node_name(name)}\n"
            for number, name in enumerate(NAMES, 1)
        )
        return (
            "cluster_formation.peer_discovery_backend = classic_config\n"
            f"{nodes}"
            "cluster_partition_handling = pause_minority\n"
            f"cluster_name = {CLUSTER}\n"
            f"net_ticktime = {NET_TICK}\n"
        )

    @property
    def _epmd_record(self) -> Path:
        # the mapper is a server of its own: nothing of it is in this directory
        return self.directory.parent / PortMapper.name / "pid"

    def _end_epmd(self) -> None:
        pass

    @property
    def _holds_ports(self) -> bool:
        return self.running


@dataclass(frozen=True, slots=True)
class Members:
    """Of a quorum queue, by the names of the nodes' directories: who has a copy, who of them is up, and who leads."""

    all: frozenset[str]
    online: frozenset[str]
    leader: str | None


class RabbitMQTrio:
    """Three nodes with the same users, and their port mapper."""

    def __init__(self, directory: Path, password: str) -> None:
        for name in (PortMapper.name, *NAMES):
            Server.share_password(directory / name, password)
        self.mapper = PortMapper(directory / PortMapper.name)
        self.nodes = tuple(RabbitMQNode(directory / name, self.mapper) for name in NAMES)
        # then a thread that mends it starts nothing any more
        self._is_discarded = False

    def url(self, vhost: str = "/", *, ports: Sequence[int] = ()) -> str:
        """The addresses of all nodes, one after the other; `ports`: where they are reached instead, as by proxies."""
        login = f"{USER}:{self.nodes[0].password}"
        return ";".join(
            f"amqp://{login}@127.0.0.1:{port}/{quote(vhost, safe='')}" for port in ports or [n.port for n in self.nodes]
        )

    def node(self, name: str) -> RabbitMQNode:
        """The node with this name of its directory."""
        return next(node for node in self.nodes if node.directory.name == name)

    def launch(self) -> None:
        if self._is_discarded:
            raise ServiceError("the cluster has been discarded")
        self.mapper.start()
        for node in self.nodes:
            node.launch()

    def wait_until_ready(self, timeout: float = READY_SECONDS) -> None:
        for node in self.nodes:
            node.wait_until_ready(timeout)
        deadline = time.monotonic() + timeout
        while (found := self.alive()) < len(self.nodes):
            if time.monotonic() > deadline:
                raise ServiceError(f"{found} of {len(self.nodes)} nodes are in one cluster after {timeout:g} s")
            time.sleep(0.2)

    def mend(self, timeout: float = READY_SECONDS) -> None:
        """Start what does not run, and start anew a node that does not find back to the others by itself, as a health check would.

        One that stood still for longer than the others have waited does not: they took it for dead. Another one is back
        without its members of some queues; what such a queue has delivered meanwhile may never reach its consumers, who
        hold it as far as the queue knows, and get nothing more. A third one leads a queue that carries out nothing (RabbitMQ 3.10).
        """
        deadline = time.monotonic() + timeout
        last: tuple[RabbitMQNode, float] | None = None
        started_again: set[RabbitMQNode] = set()
        while (found := self._lacking(started_again)) is not None:
            now = time.monotonic()
            if now > deadline:
                raise ServiceError(f"{found[0].directory.name} is not in the cluster after {timeout:g} s")
            if found != last:
                last, since = found, now
            if now > since + found[1]:
                found[0].kill()
                started_again.add(found[0])
                last = None
            self.launch()
            time.sleep(0.5)
        self.wait_until_ready(max(deadline - time.monotonic(), 1.0))

    def _lacking(self, started_again: Collection[RabbitMQNode]) -> tuple[RabbitMQNode, float] | None:
        """A node that is not in the cluster, or only in a part of it, and the seconds for which it may be so.

        A start that did not bring its members of queues back will not the next time.
        """
        if (outside := self._outside()) is not None:
            return outside, ALONE if outside.running and self._seen_by(outside) else SILENT
        for find, seconds in ((self._without_members, MEMBERLESS), (self._unanswered, 0.0)):
            if (found := find()) is not None:
                return None if found in started_again else (found, seconds)
        return None

    def _outside(self) -> RabbitMQNode | None:
        """The node that sees the fewest of all; None: they all see each other."""
        seen = {node: self._seen_by(node) for node in self.nodes}
        fewest = min(self.nodes, key=seen.__getitem__)
        return fewest if seen[fewest] < len(self.nodes) else None

    def _without_members(self) -> RabbitMQNode | None:
        """A node on which a member of a quorum queue does not run, although the node does; None: there is none."""
        try:
            queues = json.loads(self._ask("/api/queues?columns=name,members,online"))
        except (OSError, ServiceError, http.client.HTTPException):
            return None
        missing = {name for queue in queues for name in {*queue.get("members", ())} - {*queue.get("online", ())}}
        return next((node for node in self.nodes if node.node_name in missing), None)

    def _unanswered(self) -> RabbitMQNode | None:
        """A node that leads a quorum queue and does not carry out its commands; None: there is none."""
        try:
            named = self._some().control("eval", _UNANSWERED.format(milliseconds=ANSWERS_WITHIN * 1000))
        except (ServiceError, subprocess.TimeoutExpired):
            return None
        return next((node for node in self.nodes if node.node_name in named), None)

    def _seen_by(self, node: RabbitMQNode) -> int:
        """How many nodes one believes to be up; 0: it does not answer."""
        try:
            return sum(bool(each.get("running")) for each in json.loads(node.ask("/api/nodes")))
        except (OSError, ServiceError, http.client.HTTPException):
            return 0

    def members(self, queue: str, vhost: str = "/") -> Members:
        """Who has a quorum queue. Raises `ServiceError` if no node answers."""
        found = json.loads(self._ask(f"/api/queues/{quote(vhost, safe='')}/{quote(queue, safe='')}"))
        return Members(
            frozenset(map(_directory, found.get("members", ()))),
            frozenset(map(_directory, found.get("online", ()))),
            _directory(found["leader"]) if found.get("leader") else None,
        )

    def grow(self, queue: str, node: RabbitMQNode, vhost: str = "/") -> None:
        """Give a quorum queue another member."""
        self._some().control("add_member", "--vhost", vhost, queue, node.node_name, program="rabbitmq-queues")

    def shrink(self, queue: str, node: RabbitMQNode, vhost: str = "/") -> None:
        """Take a member from a quorum queue."""
        self._some().control("delete_member", "--vhost", vhost, queue, node.node_name, program="rabbitmq-queues")

    def cut_off(self, node: RabbitMQNode) -> None:
        """Cut the network between a node and the others, as they see it: their connections end, and new ones are refused.

        By the secret that Erlang's nodes share: on one machine nothing else is between them. `join_again` ends it.
        """
        others = [each.node_name for each in self.nodes if each is not node]
        calls = ", ".join(f"erlang:set_cookie('{name}', cut_off), erlang:disconnect_node('{name}')" for name in others)
        node.control("eval", f"{calls}.")

    def join_again(self, node: RabbitMQNode) -> None:
        """Let a node that was cut off find the others."""
        others = [each.node_name for each in self.nodes if each is not node]
        calls = ", ".join(f"erlang:set_cookie('{name}', erlang:get_cookie())" for name in others)
        node.control("eval", f"{calls}.")

    def seen_by_others(self, node: RabbitMQNode) -> int:
        """How many nodes the others believe to be up, as that one of them that sees the fewest."""
        return min(self._seen_by(each) for each in self.nodes if each is not node)

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.stop()
        self.mapper.stop()

    def discard(self) -> None:
        self._is_discarded = True
        for node in self.nodes:
            node.discard()
        self.mapper.discard()

    def alive(self) -> int:
        """How many nodes are up, as that one sees it that sees the fewest; 0: one does not answer."""
        return min(map(self._seen_by, self.nodes))

    def _some(self) -> RabbitMQNode:
        for node in self.nodes:
            if node.running and node.answers():
                return node
        raise ServiceError("no RabbitMQ node answers")

    def _ask(self, path: str) -> bytes:
        return self._some().ask(path)


def _node_name(name: str) -> str:
    return f"{name.replace('-', '_')}@localhost"


def _directory(node_name: str) -> str:
    return node_name.partition("@")[0].replace("_", "-")
