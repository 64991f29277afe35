"""Real Redis and PostgreSQL servers for tests, and a proxy between them and a client that makes trouble."""
