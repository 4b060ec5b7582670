"""Programs of the user that a rollout runs in processes of their own: agents written for OpenAI's interface, and environments of other packages.

A program calls the model of its rollout through the gateway. A supervisor beside it ends everything that the program has started when the rollout ends,
also if the explorer is killed.
"""
