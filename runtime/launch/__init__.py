"""Local processes: started, watched, and ended together."""
