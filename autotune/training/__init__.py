"""A configuration as a real training: model, data, adapter, loss, and the arguments of the Trainer."""
