"""What tracing would turn into a constant, or lose: habits of models, values that are read, and changes between steps.

May enter: another thing that Python code does and `torch.export` does not see, with a test that fails without it.
"""
