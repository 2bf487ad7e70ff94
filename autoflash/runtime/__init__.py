"""Compiling, launching and choosing kernels at run time."""
