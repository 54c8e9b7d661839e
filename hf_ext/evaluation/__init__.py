"""Measures of models and of text."""
