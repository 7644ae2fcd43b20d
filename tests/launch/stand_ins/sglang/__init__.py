"""Stands in for SGLang where a test is about the launchers alone: starts in milliseconds, same names, same order."""
