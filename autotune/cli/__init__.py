"""The command line: arguments in, text and exit codes out. Decides nothing about a search."""
