"""The stores that come with the package, one file each: the only place where client libraries are imported."""

from grelmicro.alone import check_alone

check_alone()
