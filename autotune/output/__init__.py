"""What people see: tables, the live display, reports, views in notebooks. Values become text; nothing is decided."""
