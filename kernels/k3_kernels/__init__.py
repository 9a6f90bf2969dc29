"""Operators of the K3 network: one folder per operator, its definition in `reference.py`."""
