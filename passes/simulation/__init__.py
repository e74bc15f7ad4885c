"""Program to timeline: traffic, memory and times."""
