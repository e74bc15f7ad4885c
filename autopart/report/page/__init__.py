"""A plan, and what was measured of it, as one HTML file that needs no network.

Data is gathered in Python (rows, memory, tables) and put into one template; the script draws it, and that is all.
"""
