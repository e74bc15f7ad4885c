"""Checkpoints: folders of tensors by name and one JSON document, written so that a crash leaves the last one whole.

May enter: what reads, writes or checks such a folder, without knowing pipes or plans.
"""
