"""What people see: the table and the progress of a search. Called by the command line alone."""
