"""What is where, and how that knowledge survives a crash."""
