"""Whether a choice of tasks saves rollouts: every selector beside uniform choice, on a synthetic learner and on a small real model."""
