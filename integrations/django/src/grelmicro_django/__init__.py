"""Django integration of grelmicro-suite."""

from grelmicro.alone import check_alone

check_alone()
