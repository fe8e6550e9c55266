from django.db import connection
from django.test import TestCase, TransactionTestCase

from orders.checkout import place_order
from orders.models import Customer
from orders.tasks import award_points


class AwardPoints(TestCase):
    """On the test's own transaction: what task and test write is rolled back at the end."""

    def setUp(self):
        Customer.objects.create(name="ann")

    def test_a_repeated_call_awards_once(self):
        order = place_order("ann", 12_000)
        for _ in range(3):
            award_points(order.pk)
        assert Customer.objects.get(name="ann").points == 120

    def test_the_next_test_finds_no_key_used(self):
        self.test_a_repeated_call_awards_once()


class AwardPointsForReal(TransactionTestCase):
    """With real commits, on the library's own connections: `flush` empties its tables as well."""

    setUp = AwardPoints.setUp
    test_a_repeated_call_awards_once = AwardPoints.test_a_repeated_call_awards_once
    test_the_next_test_finds_no_key_used = AwardPoints.test_the_next_test_finds_no_key_used

    def test_they_run_on_the_test_database(self):
        assert connection.settings_dict["NAME"].startswith("test_")
