"""The mark that a process leaves on a record to say that it waits."""

MARK = 12.0
"""Seconds for which a mark counts. Whoever still waits asks again sooner, and renews it."""

MARK_AGAIN = 1.0
"""Age in seconds from which on a waiter that asks again renews its mark."""

SEVERAL = "*"
"""The mark of more than one process, where a record has room for one."""
