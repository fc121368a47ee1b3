"""Counts collectives, tracks live tensor memory and measures device speed."""
