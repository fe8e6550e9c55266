"""Background work: recovery, purge, alerts, alarms, signs of life, gauges."""
