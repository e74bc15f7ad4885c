"""Stages that TorchInductor compiles in segments, and what their ops cost then.

May enter: other compilers of a stage's code, as an entry of `stagecode.compilers`.
"""
