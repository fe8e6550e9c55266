from celery import shared_task
from django.db.models import F

from idempotency.contrib.django import IdempotentTask
from orders.models import Customer, Order


@shared_task(name="orders.award_points", base=IdempotentTask, key="{order_id}")
def award_points(order_id):
    order = Order.objects.get(pk=order_id)
    Customer.objects.filter(pk=order.customer_id).update(points=F("points") + order.cents // 100)
