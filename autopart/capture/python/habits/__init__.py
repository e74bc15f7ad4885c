"""Python habits of models that tracing would lose: one entry in `habits.HABITS` for each.

May enter: a file that handles habits of one kind.  An entry says what it sees and which test breaks without it;
deleting the entry deletes the habit.
"""
