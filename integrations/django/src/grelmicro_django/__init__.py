"""Django integration of grelmicro-suite."""
