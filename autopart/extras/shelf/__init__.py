"""Models from the shelf: a transformers configuration file becomes a model on the meta device and a batch for it.

May enter: what reads such files, chooses the class of the model, and makes its batches.  No weights and no code of a
repository are ever read.
"""
