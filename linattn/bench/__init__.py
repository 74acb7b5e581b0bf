"""Measuring: our code and other people's, in turns, in one process."""
