"""Predicted against published: reading tables of measured runs, their errors, and what intervals rest on."""
