"""Averages of the weights (SWA, EMA) that each rank keeps of what it trains.

May enter: other averages over steps.
"""
