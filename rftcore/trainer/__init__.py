"""The trainer: the loop that draws batches and publishes weights (`role`), and the learner that changes weights (`learner`)."""
