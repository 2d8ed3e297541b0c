"""Pictures and the HTML page."""
