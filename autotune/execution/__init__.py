"""Runs trials in processes of their own: the runner, the process that forks them, and what happens inside one."""
