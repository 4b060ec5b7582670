"""One transformer as the trainer computes it: opened, sharded, with packed attention, adapters, output layer and optimizers."""
