from celery import shared_task
from django.db.models import F

from orders.models import Customer, Order


@shared_task(name="orders.award_points", acks_late=True, reject_on_worker_lost=True)
def award_points(order_id):
    order = Order.objects.get(pk=order_id)
    Customer.objects.filter(pk=order.customer_id).update(points=F("points") + order.cents // 100)
