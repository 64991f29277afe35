"""Coordination that Python web services can trust: locks, task locks, leader election and scheduled singletons."""

from importlib.metadata import PackageNotFoundError, distribution

from grelmicro.app import Grelmicro

__all__ = ["Grelmicro"]


def _refuse_the_other_package() -> None:
    """The PyPI distribution `grelmicro` is another code base with the same import name: never run a mix of both."""
    try:
        distribution("grelmicro")
    except PackageNotFoundError:
        return
    raise ImportError(
        "the distributions 'grelmicro' and 'grelmicro-suite' are both installed, and both are imported as grelmicro: "
        "run `pip uninstall -y grelmicro grelmicro-suite` and then `pip install --force-reinstall grelmicro-suite`"
    )


_refuse_the_other_package()
