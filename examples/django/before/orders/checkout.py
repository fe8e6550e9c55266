from functools import partial

from django.db import transaction

from orders.models import Order
from orders.tasks import award_points


@transaction.atomic
def place_order(customer, cents):
    order = Order.objects.create(customer_id=customer, cents=cents)
    transaction.on_commit(partial(award_points.delay, order.pk))
    return order
