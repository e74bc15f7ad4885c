"""Helpers of the tests, by what they are."""
