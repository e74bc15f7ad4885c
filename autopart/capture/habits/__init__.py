"""Python habits of models that tracing would lose, one file for each.

May enter: a file that says what it sees, what it does and which test breaks without it, with one entry in the list.
Deleting the file and its entry deletes the habit.
"""
