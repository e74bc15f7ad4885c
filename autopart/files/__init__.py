"""Plans, clusters and caches on disk: limited in size, validated, written atomically.

May enter: formats of files. torch and the passes are not known here.
"""
