"""Masks: tokens that give no gradient in a step, one file each."""
