"""What is kept between runs: plans, measured costs, compiled costs; believed only if nobody else can have written it.

May enter: kinds of files that autopart writes for itself alone.
"""
