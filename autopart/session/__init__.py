"""A plan on running processes: bring-up, executors, and the pipe that the user holds."""
