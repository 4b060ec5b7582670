"""Models that workflows ask besides the policy, and that are not trained (`explorer.models`)."""
