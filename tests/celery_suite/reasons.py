"""Why a test of Celery's fails on our tasks: a decision each, explained in docs/decisions/celery-suite.md."""

from __future__ import annotations

_WHY = "[why](decisions/celery-suite.md)"
EXPIRES = f"`expires` is refused: an accepted operation is never dropped ({_WHY})"
REJECT = f"`Reject` from a body ends the operation as `unsupported_control` ({_WHY})"
RETRY = f"`retry` with other arguments is another operation ({_WHY})"
ACKNOWLEDGED = f"acknowledged after the attempt, not before it ({_WHY})"
QUEUE = f"the queue is a quorum queue with dead letters, on a topic exchange ({_WHY})"
SCHEDULED = f"no worker holds an early message in memory; the broker or Postgres does ({_WHY})"
CONFIRM = f"a call returns with the broker's confirm; a worker may have received the message before ({_WHY})"
PROTOCOL = f"`task_protocol=1` is refused ({_WHY})"
COMMITS = f"84 operations at one slot take longer than the second that the test waits ({_WHY})"
# The outcome depends on how fast the machine is: such a test is run again, alone, too.
RACES = (CONFIRM, COMMITS)

# By test, without the folder and the parameters.
REASONS = {
    "test_canvas.py::test_chord::test_mutable_errback_called_by_chord_from_group_fail_multiple_on_body_failure": COMMITS,
    "test_group_chains.py::test_group_chains::test_group_results_reach_the_next_group": PROTOCOL,
    "test_group_chains.py::test_group_chains::test_pending_chord_keeps_header_errback": PROTOCOL,
    "test_inspect.py::test_Inspect::test_active": ACKNOWLEDGED,
    "test_inspect.py::test_Inspect::test_active_queues": QUEUE,
    "test_inspect.py::test_Inspect::test_query_task": ACKNOWLEDGED,
    "test_inspect.py::test_Inspect::test_scheduled": SCHEDULED,
    "test_tasks.py::test_task_replacement::test_replaced_task_nesting_level_0": CONFIRM,
    "test_tasks.py::test_tasks::test_expired": EXPIRES,
    "test_tasks.py::test_tasks::test_reject_with_requeue_redelivers_and_succeeds": REJECT,
    "test_tasks.py::test_tasks::test_reject_without_requeue_stores_failure": REJECT,
    "test_tasks.py::test_tasks::test_retry_switches_from_args_to_kwargs": RETRY,
    "test_tasks.py::test_tasks::test_retry_switches_from_kwargs_to_args": RETRY,
}
