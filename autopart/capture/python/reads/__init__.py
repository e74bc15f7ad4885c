"""Numbers that the model's Python reads from its batch while it is traced.

May enter: how such a read is answered from the whole batch, kept as a question for later batches, or refused.
"""
