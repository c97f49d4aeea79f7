"""Which configurations are tried, in what order and for how long: from a plan to an answer."""
