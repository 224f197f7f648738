"""The CUDA runtime, as far as this suite calls it, and the only room that does.

Owns the prototypes, how the library is found and one error class a code. Promises that importing it loads nothing, and that
where torch has loaded a runtime, this is that very instance: a pending error can be consumed through no other.
Refuses to initialise CUDA on its own account: nothing is called before somebody asks for something.
"""
