"""The cost of a configuration before it runs: the device's rates, a model's operators, memory and time."""
