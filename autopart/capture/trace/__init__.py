"""One trace of the model: torch.export, made flat and functional, with names, gradients and the user's lines.

May enter: steps from an unmodified module to the flat graph, and the one list of what is replaced in torch and Python
while tracing (`patches`).
"""
