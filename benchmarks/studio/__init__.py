"""The studio: how long a person waits for the next item."""
