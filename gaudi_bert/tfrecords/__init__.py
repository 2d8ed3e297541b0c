"""TFRecords: wire format, scan, histogram, plan, write, verify, inspect."""
