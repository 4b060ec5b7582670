"""The pipeline worker, which decides on written groups; and replays, previews and preference pairs."""
