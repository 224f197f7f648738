"""What samples mean: statistics and verdicts, as pure functions.

Owns nothing but its modules. Promises the same answer for the same samples, whoever took them. Refuses I/O and printing.
"""
