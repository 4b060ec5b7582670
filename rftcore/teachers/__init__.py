"""Teachers: models beside the policy whose log-probabilities of the rollouts' tokens are stored with them."""
