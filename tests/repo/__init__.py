"""Facts about the repository itself: its layers, its texts, its packages."""
