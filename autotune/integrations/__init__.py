"""Other programs' side of a search: trackers, callbacks, dashboards, scripts."""
