"""What the demonstrations of the sample applications share: claims, a screen, and how they end."""
