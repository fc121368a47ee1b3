"""Pipeline schedules as data: generated, verified and timed without torch."""
