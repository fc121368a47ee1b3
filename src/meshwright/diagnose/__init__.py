"""Verdicts on failed or slow runs. No torch."""
