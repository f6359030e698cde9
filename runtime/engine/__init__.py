"""Many queries through one compiled step."""
