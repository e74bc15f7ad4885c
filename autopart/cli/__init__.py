"""The command line over `autopart.api`.

May enter: commands and their flags. What they do belongs to the API.
"""
