"""Starlette integration of grelmicro-suite."""
