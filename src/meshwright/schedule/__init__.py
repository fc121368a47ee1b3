"""Schedules as data: pipeline schedules. No torch."""
