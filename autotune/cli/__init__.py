"""The command line: passes arguments to the Python API, prints results, and turns errors into exit codes."""
