"""FastAPI integration of grelmicro-suite."""
