"""What is known about single ops: axes, costs, sizes at other numbers of rows."""
