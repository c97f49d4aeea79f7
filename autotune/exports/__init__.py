"""The answer of a search as files of other tools: scripts, configurations, an image; a module for each family."""
