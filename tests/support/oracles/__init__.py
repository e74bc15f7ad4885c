"""What runs are compared with: one process, brute force, fakes that enforce rules."""
