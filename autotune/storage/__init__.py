"""What is stored on disk: run directories, the lasting record, what was learned of devices."""
