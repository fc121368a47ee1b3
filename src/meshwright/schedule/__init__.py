"""Schedules as data: pipeline schedules today. No torch."""
