"""Repeated computations of the templates, included as jit helpers; shipped as data."""
