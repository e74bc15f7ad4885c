"""Python habits of models that tracing would lose: one file and one entry in `habits.HABITS` for each.

May enter: a file that handles one habit.  Its entry says what it sees, what it does and which test breaks without it;
deleting the file and the entry deletes the habit.
"""
