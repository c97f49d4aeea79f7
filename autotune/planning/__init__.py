"""From the user's words to the plan of a search, and to the request of each of its trials."""
