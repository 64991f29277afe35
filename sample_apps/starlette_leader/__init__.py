"""A price feed that one Starlette worker of all reads, and a page that shows live who does."""
