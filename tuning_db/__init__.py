"""Reviewed tuning records, one file per GPU; shipped as data."""
