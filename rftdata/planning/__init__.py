"""Which tasks are tried next: the planner, the run's selectors, the mix of tasksets."""
