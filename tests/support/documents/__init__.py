"""Holds what makes and checks the documents."""
