"""The configurations that may be tried: parameters, rules of legality, changes, and the trials that rule some out."""
