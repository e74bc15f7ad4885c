"""Plans in the words of other trainers, and an expert's plan in ours.

May enter: another trainer's words for a plan, as an entry of `FORMATS`.
"""
