"""Makes the plan of a search from the user's options, and from the plan the requests of its trials."""
