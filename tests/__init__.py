"""The tests of the repository."""
