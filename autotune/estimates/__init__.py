"""Predictions without a trial: one configuration, a ranking, all GPUs, the ways to share several devices."""
