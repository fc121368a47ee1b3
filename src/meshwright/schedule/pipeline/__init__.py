"""Pipeline schedules as data: generated, proved, simulated and drawn without torch."""
