"""Small applications that show the packages at work; each is run by a test."""
