"""Whether choosing tasks pays: every selector against uniform choice, on a synthetic learner and on a small real model."""
