"""Workers use locks and elections while they and their store are tormented; the log of it proves that all held."""
