"""Files that last: run directories, the lasting record, measurements of devices."""
