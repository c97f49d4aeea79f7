"""Other programs' side of a search: trackers, callbacks, scripts."""
