"""Planning of groups: the planner, the run's selectors, the mixture of tasksets."""
