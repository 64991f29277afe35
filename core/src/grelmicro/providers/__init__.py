"""The providers of stores, each in a module of its own; and `Provider`, of which all are subclasses."""

from grelmicro.coordination.provider import Provider

__all__ = ["Provider"]
