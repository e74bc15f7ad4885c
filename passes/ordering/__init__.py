"""Orders of computes for given times, transfers and memory: searched, replayed, and bounded from below.

May enter: what finds or judges the order of one step.  Which ops make a stage, and on which ranks, is settled before.
"""
