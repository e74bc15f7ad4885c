"""Holds functions and scripts that run on ranks which fail, stop or start again."""
