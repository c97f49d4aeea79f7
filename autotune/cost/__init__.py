"""What a configuration costs, before it runs: how fast the device is, what a model does, memory and time."""
