"""The explorer: claims planned groups, samples their rollouts, and writes them."""
