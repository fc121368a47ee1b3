"""Schedules as data: pipeline schedules and collective algorithms. No torch."""
