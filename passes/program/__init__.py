"""Plan to program: schedules, routing, and the proof that a program runs."""
