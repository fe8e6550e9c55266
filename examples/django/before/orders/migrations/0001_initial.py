from django.db import migrations, models


class Migration(migrations.Migration):
    operations = [
        migrations.CreateModel(
            "Customer",
            [("name", models.CharField(max_length=100, primary_key=True)), ("points", models.IntegerField(default=0))],
        ),
        migrations.CreateModel(
            "Order",
            [
                ("id", models.BigAutoField(primary_key=True)),
                ("customer", models.ForeignKey("orders.Customer", models.CASCADE)),
                ("cents", models.IntegerField()),
            ],
        ),
    ]
