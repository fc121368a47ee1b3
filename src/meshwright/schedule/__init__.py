"""Pipeline schedules as data: generated, proved, walked and drawn without torch."""
