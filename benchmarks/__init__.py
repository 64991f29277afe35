"""How fast the locks are, beside the bare floor of each store and, where there is one, the PyPI peer."""
