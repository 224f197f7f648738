"""How mapped payload files become memory that a device reads directly, and how they stop being it.

Owns the arithmetic of ranges and chunks, the budget, the turn of each rank, the registration itself, its release and the
vote of a group. Promises all or nothing: a process holds every planned range registered, or none and bounded staging.
Unregistering always precedes unmapping. Refuses writable memory, and to cancel a driver call: nothing can.
"""
