"""Benchmarks of the operators: each against its floor and, where installed, against the best public kernel."""
