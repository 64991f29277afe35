"""A shop on several FastAPI workers, and a demonstration of what its locks prevent."""
