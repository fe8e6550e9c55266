"""What runs beside the work: recovery, purge, alerts, alarms, signs of life."""
