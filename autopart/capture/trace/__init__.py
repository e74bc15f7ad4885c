"""One trace of the model: torch.export, made flat and functional, with names, gradients and the user's lines.

May enter: steps from an unmodified module to the flat graph.
"""
