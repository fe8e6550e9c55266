"""No number is missing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.integration.bad_inputs.test_messages import WIRE

# There is no part of the system yet that these could be said to.
NOTHING_YET = {24, 25, 26, 27, 33}


HTTP = "tests/pipeline/test_api.py"
STARTS = "tests/integration/test_doctor_starts.py"
ELSEWHERE = {
    5: (HTTP, "test_a_bad_request_is_refused_by_field_and_accepts_nothing"),
    6: (HTTP, "test_a_key_means_the_same_quoted_and_bare_and_in_any_order_of_members"),
    12: (HTTP, "test_a_bad_request_is_refused_by_field_and_accepts_nothing"),
    13: ("tests/pipeline/test_payments.py", "test_a_bad_purchase_is_refused_by_field_and_nothing_is_written"),
    14: (
        "tests/pipeline/test_payments.py",
        "test_a_bad_refund_is_refused_by_field_and_nothing_is_written",
        "test_a_refund_of_more_than_is_left_is_refused_and_gives_nothing_back",
        "test_two_refunds_that_race_past_the_total_give_back_one",
        "test_a_refund_of_a_pending_payment_is_deferred_and_uses_no_attempt",
        "test_a_refund_of_an_uncaptured_payment_is_refused_and_the_row_says_why",
    ),
    15: (HTTP, "test_an_operation_of_another_tenant_and_an_unknown_one_are_the_same_404"),
    28: (STARTS, "test_a_worker_that_would_lose_work_does_not_start"),
    29: (
        "tests/integration/test_doctor.py",
        "test_a_database_that_forgets_in_a_power_cut_is_refused",
        "test_a_redis_that_forgets_or_refuses_hints_is_a_warning",
        f"{STARTS}::test_a_worker_on_old_tables_does_not_start",
    ),
    30: (
        "tests/integration/test_doctor.py",
        "test_a_failing_address_is_reported_without_its_password",
        f"{STARTS}::test_neither_worker_nor_relay_starts_with_an_invalid_address",
    ),
    32: ("tests/pipeline/test_admin.py", "test_who_may_not_is_told_so_and_leaves_an_audit_row"),
    34: (
        "tests/integration/test_service_servers.py",
        "test_without_rabbitmq_a_second_redis_is_the_broker",
        "test_a_server_that_cannot_start_says_why_without_its_password",
    ),
}


def test_every_number_has_its_case_here_or_is_named_elsewhere(request: pytest.FixtureRequest) -> None:
    names = [item.name for item in request.session.items if item.path.parent == Path(__file__).parent]
    if len({name.partition("[")[0] for name in names}) < 20:
        pytest.skip("only a part of this folder was asked for")
    here = {int(number) for name in names for number in re.findall(r"\[(\d\d)-", name)}
    here |= {int(name[:2]) for name in WIRE}
    assert here | set(ELSEWHERE) | NOTHING_YET == set(range(1, 35))
    assert not here & NOTHING_YET
    root = Path(__file__).parents[3]
    for path, *tests in ELSEWHERE.values():
        for test in tests:
            file, _, name = test.rpartition("::")
            tree = ast.parse((root / (file or path)).read_text())
            assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
