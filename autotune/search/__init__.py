"""Runs a search: chooses configurations, runs their trials within the budget, and writes the answer."""
