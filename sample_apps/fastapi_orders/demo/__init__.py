"""Runs the shop on several workers, and shows what its lock and its leader prevent: `make demo`."""
