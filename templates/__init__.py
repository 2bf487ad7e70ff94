"""Jinja templates; shipped as data, never imported for code."""
