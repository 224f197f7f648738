"""What the kernel says about processes, files and mounts.

Owns one parser for each /proc file that the suite reads, and the page cache of a file.
Promises frozen values in base units (bytes, seconds, nanoseconds), `None` or `Unavailable` for what is not known, and no
exception for whatever the text holds. Refuses writing, signals, judgement, and imports of any other room.

A parser is pure (`parse_status(text)`), a reader takes the root of the tree (`read_status(pid, proc_root)`). A thread is a
process of a smaller tree: `read_stat(tid, proc_root / str(pid) / "task")`.
"""
