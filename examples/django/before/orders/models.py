"""A small shop: every order earns its customer points."""

from django.db import models


class Customer(models.Model):
    name = models.CharField(max_length=100, primary_key=True)
    points = models.IntegerField(default=0)


class Order(models.Model):
    id = models.BigAutoField(primary_key=True)
    customer = models.ForeignKey(Customer, models.CASCADE)
    cents = models.IntegerField()
