"""The configurations that may be tried: parameters, rules of legality, what each changes, and what is known of them."""
