"""References that runs are compared with: one process, brute force, and fakes that enforce rules."""
