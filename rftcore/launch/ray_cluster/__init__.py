"""A run on a Ray cluster: its connection, its actors, the watch over it, and replays with several processes."""
