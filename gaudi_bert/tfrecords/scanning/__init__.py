"""Reading record files at full speed, and what they hold."""
