"""The model's state by name, the loss scaler, and guards against scripts that would lose updates.

May enter: what is read or written between steps.
"""
