"""What is kept between runs: plans, measured costs, compiled costs; validated like files of others.

May enter: kinds of files that autopart writes for itself alone.
"""
