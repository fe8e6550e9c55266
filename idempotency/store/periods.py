"""The periods that records are partitioned by: which partitions there are, and which there should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection

from .inserting import IS_PARTITIONED
from .migrations.partitioning import PARTITIONS

# How long the partitions of a kind are, and how many are made ahead. What comes while none is there goes to the default one.
WIDTHS = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(weeks=1)}
AHEAD = {"hour": 6, "day": 3, "week": 2}
# Where no comment says it, and no partition is a whole period long.
DEFAULT_WIDTH = "day"
# A Monday: weeks begin there.
_FIRST = datetime(2001, 1, 1, tzinfo=UTC)
# Where the original table begins as a partition.
_EVER = datetime(1, 1, 1, tzinfo=UTC)
# A partition that is made in the middle of a period begins so much later than now: no row that is there already belongs into it.
MARGIN = timedelta(seconds=10)

_WIDTH = f"SELECT obj_description(to_regnamespace('{PARTITIONS}'), 'pg_namespace')"
_BOUNDS = f"SELECT name, begins_at, ends_at, is_default, estimated, clock_timestamp() AS now FROM {PARTITIONS}.bounds()"


@dataclass(frozen=True, slots=True)
class Partition:
    """A range of creation. Without `begins_at`: the original table; without `ends_at`: the default one."""

    name: str
    begins_at: datetime | None
    ends_at: datetime | None
    is_default: bool
    estimated: float


@dataclass(frozen=True, slots=True)
class Partitions:
    """All partitions of the records, how long new ones are, and the database's time.

    `is_told`: a comment on their schema says how long; some dumps leave comments out. Otherwise they go on as they are.
    """

    width: str
    is_told: bool
    all: Sequence[Partition]
    now: datetime

    @property
    def default_name(self) -> str:
        return next(each.name for each in self.all if each.is_default)

    @property
    def last(self) -> datetime | None:
        """When the last one ends that is reached from now without a gap. None: what comes goes to the default one."""
        reached = self.now
        for begins, ends in _in_order(self.all):
            if begins <= reached:
                reached = max(reached, ends)
        return reached if reached > self.now else None

    @property
    def wanted(self) -> datetime:
        """Until when there should be partitions: the present one, and those made ahead."""
        return border(self.now, self.width) + AHEAD[self.width] * WIDTHS[self.width]


def found(connection: Connection) -> Partitions | None:
    """The partitions of the records; None if they are in a plain table."""
    if not connection.exec_driver_sql(IS_PARTITIONED).scalar_one():
        return None
    told = connection.exec_driver_sql(_WIDTH).scalar_one()
    rows = connection.exec_driver_sql(_BOUNDS).all()
    made = [Partition(each.name, each.begins_at, each.ends_at, each.is_default, each.estimated) for each in rows]
    is_told = told in WIDTHS
    return Partitions(told if is_told else _longest(made), is_told, made, rows[0].now)


def _longest(made: Sequence[Partition]) -> str:
    """The longest period among them."""
    lengths = {each.ends_at - each.begins_at for each in made if each.begins_at and each.ends_at}
    return max((each for each in WIDTHS if WIDTHS[each] in lengths), key=WIDTHS.__getitem__, default=DEFAULT_WIDTH)


def missing(partitions: Partitions) -> list[tuple[datetime, datetime]]:
    """The ranges for which there should be partitions and are none; also between those that are there.

    One pass beside a clock that is far ahead makes some in the future, and none in between.
    """
    soon, ranges = partitions.now + MARGIN, []
    begins = soon
    wanted = partitions.wanted
    for taken, until in [*_in_order(partitions.all), (wanted, wanted)]:
        stop = min(taken, wanted)
        if begins == soon < stop:
            begins = soon.replace(microsecond=0) + timedelta(seconds=1)
        begins = begins.astimezone(UTC)
        while begins < stop:
            ends = min(border(begins, partitions.width), stop)
            ranges.append((begins, ends))
            begins = ends
        begins = max(begins, until)
    return ranges


def _in_order(partitions: Sequence[Partition]) -> list[tuple[datetime, datetime]]:
    """When they begin and end, without the default one."""
    return sorted((each.begins_at or _EVER, each.ends_at) for each in partitions if each.ends_at is not None)


def name_of(begins: datetime) -> str:
    """The name of the partition of rows from this time on."""
    return f"records_{begins.astimezone(UTC):%Y%m%dt%H%M%S}"


def border(at: datetime, width: str) -> datetime:
    """The end of the period in which this time is."""
    return _FIRST + ((at - _FIRST) // WIDTHS[width] + 1) * WIDTHS[width]


def locks_of_each(connection: Connection) -> int:
    """How much of each partition a statement locks that is planned: itself and its indexes."""
    statement = "SELECT 1 + count(*) FROM pg_index WHERE indrelid = 'idempotency.records'::regclass"
    return int(connection.exec_driver_sql(statement).scalar_one())
